"""What can be rented, as dated data files: each figure with its source. See README.md beside this file."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""Where the files lie."""

AWS = FOLDER / "aws"
"""Facts of AWS."""
