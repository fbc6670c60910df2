"""A publisher for a topic exchange of RabbitMQ; the routing key is the topic."""

from pillarbox.relay.publishers.rabbitmq.publisher import RabbitMQPublisher

__all__ = ["RabbitMQPublisher"]
