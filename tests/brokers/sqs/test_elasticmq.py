"""The suites over ElasticMQ, another implementation of SQS, without SNS."""

from collections.abc import Iterator

import pytest

from pillarbox.relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.brokers.sqs.test_sqs_suite import SNS_PAYLOAD_BYTES, SqsPublisherCase
from tests.fixtures.elasticmq import elasticmq
from tests.fixtures.sqs import Aws, account
from tests.servers.sqs import SqsServer

pytestmark = pytest.mark.variant


@pytest.fixture(scope="module")
def shared_sqs() -> Iterator[SqsServer]:
    with elasticmq() as server:
        yield server


@pytest.fixture(scope="module")
def aws(shared_sqs: SqsServer) -> Iterator[Aws]:
    with account(shared_sqs) as shared:
        yield shared


class TestStandardPublisher(SqsPublisherCase):
    # ElasticMQ takes 256 KiB, and AWS 1 MiB.
    max_payload_bytes = SNS_PAYLOAD_BYTES

    test_messages_arrive_unchanged = PublisherSuite.test_messages_arrive_unchanged


class TestFifoPublisher(SqsPublisherCase, PublisherSuite):
    capabilities = Capabilities(deduplicates=True)
    max_payload_bytes = SNS_PAYLOAD_BYTES

    fifo = ".fifo"
