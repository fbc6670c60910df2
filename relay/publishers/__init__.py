"""One module per broker, found by entry point; importing this package loads none."""
