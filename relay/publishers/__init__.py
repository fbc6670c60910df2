"""One module for each broker, found by entry point; importing this loads none."""
