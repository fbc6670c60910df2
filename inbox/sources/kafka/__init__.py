"""A source that reads Kafka: the consumer is the consumer group."""

from inbox.sources.kafka.source import KafkaSource

__all__ = ["KafkaSource"]
