"""What can be rented, as dated data files: each figure with its source. See README.md beside this file."""
