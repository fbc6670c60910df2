"""A source that reads Kafka: a topic is a Kafka topic, a consumer is a group."""

from pillarbox.inbox.sources.kafka.source import KafkaSource

__all__ = ["KafkaSource"]
