"""Sources by broker, found by URL scheme; importing `inbox` imports none of them."""
