"""faststream-outbox, measured as its documentation recommends."""
