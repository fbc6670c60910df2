"""Deliveries out of a queue of RabbitMQ; the queue is the consumer's."""

from inbox.sources.rabbitmq.source import RabbitMQSource

__all__ = ["RabbitMQSource"]
