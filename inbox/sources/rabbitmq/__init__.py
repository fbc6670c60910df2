"""A source that reads the consumer's queue of RabbitMQ."""

from inbox.sources.rabbitmq.source import RabbitMQSource

__all__ = ["RabbitMQSource"]
