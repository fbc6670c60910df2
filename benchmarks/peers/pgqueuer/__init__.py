"""pgqueuer, measured as its own benchmark does."""
