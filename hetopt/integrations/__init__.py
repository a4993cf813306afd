"""What joins hetopt to programs of others that only some have installed."""
