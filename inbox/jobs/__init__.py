"""Long handlers, which run under a lease instead of in one transaction."""
