"""The postgres publisher, and the copy's, pass the suites for every adapter."""

from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from inbox.sources.postgres import InboxSource
from inbox.testing.source_suite import Capabilities as SourceCapabilities
from inbox.testing.source_suite import SourceSuite
from pillarbox import Message
from relay.publisher import Acked
from relay.publishers.postgres import PostgresPublisher
from relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.fixtures.sessions import execute
from tests.fixtures.through_proxy import ProxiedUrl
from tests.fixtures.urls import copy_of, with_options


class TestPostgresPublisher(ProxiedUrl, PublisherSuite):
    server = "database_url"
    capabilities = Capabilities(refuses_alone=False, deduplicates=True)
    received_from = "SELECT id, {} FROM outbox.message WHERE topic = %s ORDER BY seq"

    @override
    def publisher(self) -> PostgresPublisher:
        return PostgresPublisher(
            with_options(self.url, max_payload_bytes=self.max_payload_bytes)
        )

    @override
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        columns = "topic, payload, key, tenant, headers, content_type, schema_version"
        query = self.received_from.format(columns)
        found = [
            Message(
                topic,
                payload,
                key=key,
                tenant=tenant,
                headers=headers,
                id=id,
                content_type=content_type,
                schema_version=version,
            )
            for id, topic, payload, key, tenant, headers, content_type, version in (
                execute(self.direct, query, [topic])
            )
        ]
        assert len({message.id for message in found}) >= count
        return found

    @override
    def bad_message(self, topic: str) -> Message:
        return Message(topic, b"1", key="key-0", tenant="no NUL \0 in PostgreSQL")


class TestInboxPublisher(TestPostgresPublisher):
    capabilities = Capabilities()
    received_from = (
        "SELECT message_id, {} FROM inbox.message WHERE topic = %s ORDER BY seq"
    )

    @override
    def publisher(self) -> PostgresPublisher:
        limit = self.max_payload_bytes
        return PostgresPublisher(
            with_options(copy_of(self.url), max_payload_bytes=limit)
        )

    @override
    async def prepare(self, topic: str) -> None:
        execute(
            self.direct, "INSERT INTO inbox.subscription VALUES ('one', %s)", [topic]
        )

    @override
    async def refused_message(self) -> Message:
        return Message("nobody-subscribes-to-this", b"1")


class TestPostgresSource(ProxiedUrl, SourceSuite):
    server = "database_url"
    capabilities = SourceCapabilities(takes_bytes=False, takes_bytes_as_topic=False)
    hold = 2.0
    answer_timeout = 20.0

    @override
    def source(self, consumer: str, topic: str) -> InboxSource:
        return InboxSource(
            with_options(self.url, lease=timedelta(seconds=self.hold)),
            consumer=consumer,
            topics=[topic],
            poll_interval=timedelta(milliseconds=100),
            sweep_interval=timedelta(milliseconds=200),
            answer_timeout=timedelta(seconds=self.answer_timeout),
            leave_timeout=timedelta(seconds=2),
        )

    @override
    def test_a_stall_is_reported_and_loses_nothing(self) -> None:
        self.answer_timeout = 3.0
        super().test_a_stall_is_reported_and_loses_nothing()

    @override
    async def put(self, *messages: Message) -> None:
        async with PostgresPublisher(copy_of(self.direct)) as publisher:
            assert await publisher.publish(messages) == [Acked()] * len(messages)

    @override
    async def put_foreign(self, topic: str, payload: bytes) -> None:
        execute(
            self.direct,
            "INSERT INTO inbox.message (message_id, lane, schema_version,"
            " topic, content_type, headers, payload)"
            " VALUES (gen_random_uuid(), 0, 1, %s, 'x/y', '[1]', %s)",
            [topic, payload],
        )
