"""A publisher for Kafka: a topic maps to a Kafka topic, a key to a Kafka partition."""

from pillarbox.relay.publishers.kafka.publisher import KafkaPublisher

__all__ = ["KafkaPublisher"]
