"""procrastinate, measured as its own benchmark does."""
