"""`python -m hetopt` is the `hetopt` command, of the Python that is named."""

from __future__ import annotations

from hetopt.cli.main import main

if __name__ == "__main__":
    main()
