"""Dead letters of the outbox."""
