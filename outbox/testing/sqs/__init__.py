"""A private substitute for Amazon SQS and SNS in tests: moto's server."""

from outbox.testing.sqs.server import SqsServer, sqs_server

__all__ = ["SqsServer", "sqs_server"]
