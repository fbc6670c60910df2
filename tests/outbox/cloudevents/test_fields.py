"""Messages are converted to fields and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox import InvalidMessageError, Message
from pillarbox.outbox.cloudevents.fields import from_fields, to_fields
from pillarbox.outbox.cloudevents.headers import to_headers
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.limits import reserved_header

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
MESSAGES = st.builds(
    Message,
    TEXT,
    st.binary(max_size=50),
    key=st.none() | TEXT,
    tenant=st.none() | TEXT,
    headers=st.dictionaries(
        TEXT.filter(lambda name: reserved_header([name]) is None),
        TEXT | st.just(""),
        max_size=3,
    ),
    content_type=TEXT,
    schema_version=st.integers(1, 2**31 - 1),
    priority=st.sampled_from(Priority),
)
SOUND = to_fields(Message("orders", b"body", key="k"))


@given(MESSAGES)
def test_a_message_survives_the_transport(message: Message) -> None:
    assert from_fields(to_fields(message)) == message


def test_a_message_becomes_its_headers_and_a_field_with_the_payload() -> None:
    message = Message("t", b"body", key="k", tenant="x", headers={"payload": "1"})
    headers = to_headers(message, "ce_")
    assert headers["payload"] == "1"
    assert to_fields(message) == {
        **{name.encode(): value.encode() for name, value in headers.items()},
        b"ce_data": b"body",
    }


@pytest.mark.parametrize(
    ("field", "priority"),
    [
        ({}, Priority.DEFAULT),
        ({b"ce_priority": b"default"}, Priority.DEFAULT),
        ({b"ce_priority": b"realtime"}, Priority.REALTIME),
        ({b"ce_priority": b"bulk"}, Priority.BULK),
        ({b"ce_priority": b"5"}, Priority.DEFAULT),
        ({b"ce_priority": b""}, Priority.DEFAULT),
    ],
)
def test_a_priority_is_one_of_ours_or_the_default(
    field: dict[bytes, bytes], priority: Priority
) -> None:
    read = from_fields({**SOUND, **field})
    assert (read.priority, dict(read.headers)) == (priority, {})
    assert b"ce_priority" not in SOUND


def test_an_unknown_field_is_a_header_and_a_missing_one_is_named() -> None:
    assert from_fields({**SOUND, b"new": b"?"}).headers == {"new": "?"}
    for name, missing in (
        (b"ce_id", "id"),
        (b"ce_type", "type"),
        (b"ce_data", "payload"),
    ):
        fields = {key: value for key, value in SOUND.items() if key != name}
        with pytest.raises(InvalidMessageError, match=f"message {missing} .*missing"):
            from_fields(fields)


def test_fields_that_are_no_text_are_refused() -> None:
    for name, value, field in (
        (b"ce_type", b"\xff", "ce_type"),
        (b"a", b"\xff", "a"),
        (b"\xff", b"", "headers"),
    ):
        with pytest.raises(InvalidMessageError, match=rf"message {field} .*UTF-8"):
            from_fields({**SOUND, name: value})
