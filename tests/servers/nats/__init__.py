"""A private NATS server with JetStream for tests."""

from tests.servers.nats.server import NatsServer, nats_server

__all__ = ["NatsServer", "nats_server"]
