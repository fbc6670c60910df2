"""A private RabbitMQ server for tests."""

from tests.servers.rabbitmq.server import RabbitMQServer, rabbitmq_server

__all__ = ["RabbitMQServer", "rabbitmq_server"]
