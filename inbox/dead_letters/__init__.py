"""A consumer's dead letters: `write` stores them, `retry` handles them again."""
