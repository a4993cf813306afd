"""Where a run happens: this machine, a cluster emulated on it, or rented machines."""
