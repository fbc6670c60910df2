"""The suites and faults over old and new servers: `python -m tests.matrix`."""
