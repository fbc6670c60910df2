"""A private substitute for Amazon SQS and SNS in tests: moto's server."""

from tests.servers.sqs.server import SqsServer, sqs_server

__all__ = ["SqsServer", "sqs_server"]
