"""Custom headers can't pose as attributes: `add` refuses the reserved names."""

import pytest
from sqlalchemy.orm import Session

import pillarbox
from outbox.errors import InvalidMessageError
from outbox.limits import STORED_HEADERS, reserved_header
from pillarbox import Message, insert_statement

RESERVED = [
    *("ce-tenant", "ce_tenant", "CE-Type", "Ce_Id", "ce-anything"),
    *("cloudEvents:tenant", "cloudevents:id", "cloudEvents_type", "CLOUDEVENTS:x"),
    *("pillarbox-codec", "Pillarbox-Headers", "pillarbox-topic"),
    *("webhook-id", "Webhook-Signature", "Nats-Msg-Id", "nats-rollup"),
    *("content-type", "Content-Type"),
]
FREE = [
    *("ce", "cement", "ceremony-id", "cloudevents", "cloudeventſ:tenant", "x-ce-id"),
    *("pillarbox", "webhook", "content-type-of-body", "content-types", "nats"),
    *("traceparent", "tracestate", "causation-id", "authorization", "h:x"),
]


@pytest.mark.parametrize("name", RESERVED)
def test_a_reserved_name_is_refused_when_it_is_added(name: str) -> None:
    session = Session()
    message = Message("t", b"", headers={"x": "1", name: "forged"})

    with pytest.raises(InvalidMessageError, match="is a reserved name") as it:
        pillarbox.add(session, message)
    with pytest.raises(InvalidMessageError, match="is a reserved name"):
        insert_statement(message)

    assert (it.value.field, it.value.value) == ("headers", name)
    assert not session.new


def test_other_names_are_free_but_not_a_codecs() -> None:
    for name in FREE:
        insert_statement(Message("t", b"", headers={name: "1"}))
    assert all(reserved_header([name]) for name in STORED_HEADERS)
