"""Dead letters of a consumer."""
