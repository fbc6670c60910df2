"""A private Kafka for tests: the mock cluster that is part of librdkafka."""

from tests.servers.kafka.server import COMMIT, PRODUCE, KafkaCluster, kafka_cluster

__all__ = ["COMMIT", "PRODUCE", "KafkaCluster", "kafka_cluster"]
