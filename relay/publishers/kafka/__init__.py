"""A publisher for Kafka: a topic maps to a Kafka topic, a key to a Kafka partition."""

from relay.publishers.kafka.publisher import KafkaPublisher

__all__ = ["KafkaPublisher"]
