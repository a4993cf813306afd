"""Where a run happens: launchers are peers behind one protocol."""
