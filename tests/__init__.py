"""The tests: a folder for each kind, from pure functions to whole processes."""
