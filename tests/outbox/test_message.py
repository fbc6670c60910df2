"""The class Message: construction, copies, and what its repr shows."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from pillarbox import InvalidMessageError, Message, uuid7
from pillarbox.outbox.errors import CodecError
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.message_id import is_uuid7


def test_bytes_are_accepted_unchanged_and_keep_a_given_content_type() -> None:
    message = Message("orders.placed", b"\x00\xff")

    assert message.payload == b"\x00\xff"
    assert message.content_type == "application/octet-stream"
    for payload in (b"<a/>", {"a": 1}):
        given = Message("t", payload, content_type="text/xml")
        assert given.content_type == "text/xml"
    with pytest.raises(CodecError, match=r"payload.*isn't JSON.*content_type"):
        message.json()


@pytest.mark.parametrize(
    ("payload", "encoded"),
    [
        ({"order": 1, "total": 9.5}, b'{"order":1,"total":9.5}'),
        (["ä", None, True], '["ä",null,true]'.encode()),
        ("text", b'"text"'),
        (None, b"null"),
    ],
)
def test_anything_else_is_encoded_as_compact_json(
    payload: object, encoded: bytes
) -> None:
    message = Message("orders.placed", payload)

    assert message.payload == encoded
    assert message.content_type == "application/json"
    assert message.json() == payload


def test_every_message_gets_its_own_id() -> None:
    one, other = Message("t", b""), Message("t", b"")

    assert is_uuid7(one.id)
    assert one.id != other.id


def test_one_dict_of_headers_serves_many_messages() -> None:
    headers: dict[str, str] = {}
    made = []
    for item in "abc":
        headers["item"] = item
        made.append(Message("t", b"", headers=headers))
    headers["nats-later"] = "a name that add refuses"

    assert [message.headers for message in made] == [{"item": it} for it in "abc"]


def test_a_mutable_payload_is_encoded_at_once() -> None:
    order = {"lines": [1]}
    message = Message("t", order)

    order["lines"].append(2)

    assert message.json() == {"lines": [1]}


def test_headers_that_are_no_mapping_are_refused_at_once() -> None:
    others: list[Any] = [None, [("a", "b")], "ab"]
    for headers in others:
        with pytest.raises(InvalidMessageError, match=r"headers .* isn't a mapping"):
            Message("t", b"", headers=headers)


@pytest.mark.parametrize("headers", [{}, {"a": "b"}])
@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        replace,
        lambda message: pickle.loads(pickle.dumps(message)),
        lambda message: Message(**asdict(message)),
    ],
)
def test_a_message_is_a_value(
    duplicate: Callable[[Message], Message], headers: dict[str, str]
) -> None:
    message = Message("t", {"a": 1}, key="k", headers=headers)

    same = duplicate(message)

    assert same == message
    assert hash(same) == hash(message)
    assert {message, same, message.replace(headers={"c": "d"})} > {message}
    with pytest.raises(TypeError, match="can't be changed"):
        same.headers.update(c="d")  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        same.topic = "other"  # type: ignore[misc]


def test_equal_fields_make_equal_messages() -> None:
    id = uuid7()

    assert Message("t", {"a": 1}, id=id) == Message(
        "t", b'{"a":1}', id=id, content_type="application/json"
    )
    assert Message("t", b"a", id=id) != Message("t", b"b", id=id)


def test_a_log_does_not_show_the_payload() -> None:
    message = Message("t", b"secret", key="k", id=UUID(int=7))

    assert repr(message) == (
        f"Message(topic='t', key='k', id='{UUID(int=7)}', payload=<6 bytes>)"
    )


def test_a_copy_differs_only_in_the_replaced_attributes() -> None:
    message = Message(
        "orders",
        b"\xff",
        key="k",
        tenant="t",
        headers={"a": "b"},
        content_type="image/png",
        schema_version=3,
        priority=Priority.BULK,
        available_at=datetime(2030, 1, 1, tzinfo=UTC),
    )
    copy = message.replace(headers={}, schema_version=4)
    assert copy != message
    assert (copy.headers, copy.schema_version) == ({}, 4)
    assert copy.replace(headers={"a": "b"}, schema_version=3) == message


def test_a_new_payload_is_encoded_and_gets_its_content_type() -> None:
    message = Message("orders", b"\xff", content_type="image/png")
    assert message.replace(payload=b"\xfe").content_type == "image/png"
    assert message.replace(payload={"a": 1}).payload == b'{"a":1}'
    assert message.replace(payload={"a": 1}).content_type == "application/json"
    kind = "application/vnd.acme+json"
    assert message.replace(payload=[], content_type=kind).content_type == kind
