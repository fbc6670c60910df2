"""Kafka, for its publisher and its source."""
