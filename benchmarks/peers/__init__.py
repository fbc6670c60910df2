"""Other outbox libraries, each drained by its own relay in its own environment."""
