"""Checks of a release: `python -m tests.release.changelog v1.2.3`."""
