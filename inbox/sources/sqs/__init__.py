"""A source that reads Amazon SQS queues, which can be subscribed to SNS topics."""

from pillarbox.inbox.sources.sqs.source import SqsSource

__all__ = ["SqsSource"]
