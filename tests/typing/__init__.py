"""What type checkers see of the public names: mypy and Pyright check these files."""
