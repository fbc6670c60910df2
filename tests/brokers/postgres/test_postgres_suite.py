"""The postgres publisher passes the suite for every adapter."""

from collections.abc import Sequence

from typing_extensions import override

from pillarbox import Message
from pillarbox.outbox.lane import priority_of
from pillarbox.relay.publishers.postgres import PostgresPublisher
from pillarbox.relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.fixtures.sessions import execute
from tests.fixtures.through_proxy import ProxiedUrl
from tests.fixtures.urls import with_options


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
        columns = (
            "topic, payload, key, tenant, headers, content_type, schema_version, lane"
        )
        query = self.received_from.format(columns)
        found = [
            Message(
                topic,
                payload,
                key=key,
                tenant=tenant,
                headers=headers,
                id=id,
                content_type=kind,
                schema_version=version,
                priority=priority_of(lane),
            )
            for id, topic, payload, key, tenant, headers, kind, version, lane in (
                execute(self.direct, query, [topic])
            )
        ]
        assert len({message.id for message in found}) >= count
        return found

    @override
    def bad_message(self, topic: str) -> Message:
        return Message(topic, b"1", key="key-0", tenant="no NUL \0 in PostgreSQL")
