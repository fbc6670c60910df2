"""The wheel in bare environments: `python -m tests.install`."""
