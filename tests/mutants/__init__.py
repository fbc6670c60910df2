"""The product with one fault at a time: `python -m tests.mutants`."""
