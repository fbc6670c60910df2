"""NATS JetStream, for its publisher and its source."""
