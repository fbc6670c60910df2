"""Deliveries out of Kafka: the topic is the topic, the consumer group the consumer."""

from inbox.sources.kafka.source import KafkaSource

__all__ = ["KafkaSource"]
