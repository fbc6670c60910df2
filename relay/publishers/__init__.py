"""One module per broker, found by entry point and not loaded by this package."""
