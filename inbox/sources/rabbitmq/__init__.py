"""A source that reads a RabbitMQ queue; each consumer has its own."""

from pillarbox.inbox.sources.rabbitmq.source import RabbitMQSource

__all__ = ["RabbitMQSource"]
