"""Dead letters of a consumer: `write` stores them, `retry` handles them again."""
