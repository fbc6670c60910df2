"""Publishes to Kafka: the topic is the topic, the key chooses the Kafka partition."""

from relay.publishers.kafka.publisher import KafkaPublisher

__all__ = ["KafkaPublisher"]
