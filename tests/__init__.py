"""The tests: one folder for each kind, from pure functions to whole processes."""
