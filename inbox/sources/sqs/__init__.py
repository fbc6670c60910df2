"""Deliveries out of queues of Amazon SQS, which may be subscribed to topics of SNS."""

from inbox.sources.sqs.source import SqsSource

__all__ = ["SqsSource"]
