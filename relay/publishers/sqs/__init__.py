"""Publishes to Amazon SQS, where the queue is the topic, or to topics of Amazon SNS."""

from relay.publishers.sqs.publisher import SqsPublisher

__all__ = ["SqsPublisher"]
