"""Writers, and idempotent handlers, in applications of other frameworks."""
