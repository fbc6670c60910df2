"""Sources by broker, found by URL scheme; importing `inbox` doesn't import them."""
