"""Messages whose handlers are in the relay's own process: a consumer's."""
