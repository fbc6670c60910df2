"""A publisher for Amazon SQS and SNS: a topic maps to a queue or an SNS topic."""

from pillarbox.relay.publishers.sqs.publisher import SqsPublisher

__all__ = ["SqsPublisher"]
