"""What hetopt promises in numbers, measured: `python -m benchmarks.NAME [--quick] [--json FILE]`."""
