"""How logs show events, and text from other sources."""
