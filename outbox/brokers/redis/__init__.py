"""Redis Streams, for its publisher and its source."""
