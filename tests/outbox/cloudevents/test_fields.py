"""Messages are converted to fields and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.cloudevents.fields import from_fields, to_fields
from pillarbox import InvalidMessageError, Message

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
MESSAGES = st.builds(
    Message,
    TEXT,
    st.binary(max_size=50),
    key=st.none() | TEXT,
    tenant=st.none() | TEXT,
    headers=st.dictionaries(TEXT, TEXT | st.just(""), max_size=3),
    content_type=TEXT,
    schema_version=st.integers(1, 2**31 - 1),
)
SOUND = to_fields(Message("orders", b"body", key="k"))


@given(MESSAGES)
def test_a_message_survives_the_transport(message: Message) -> None:
    assert from_fields(to_fields(message)) == message


def test_a_message_becomes_named_fields() -> None:
    message = Message("t", b"body", key="k", tenant="x", headers={"trace": "1"})
    assert to_fields(message) == {
        b"id": str(message.id).encode(),
        b"topic": b"t",
        b"content_type": b"application/octet-stream",
        b"schema_version": b"1",
        b"key": b"k",
        b"tenant": b"x",
        b"h:trace": b"1",
        b"payload": b"body",
    }


def test_unknown_fields_are_ignored_and_a_missing_one_is_named() -> None:
    assert from_fields({**SOUND, b"new": b"?"}) == from_fields(SOUND)
    for name in (b"id", b"topic", b"payload"):
        fields = {key: value for key, value in SOUND.items() if key != name}
        missing = f"message {name.decode()} .*missing"
        with pytest.raises(InvalidMessageError, match=missing):
            from_fields(fields)


def test_an_invalid_field_is_named() -> None:
    for name, value in (
        (b"id", b"7"),
        (b"topic", b"\xff"),
        (b"key", b"\xff"),
        (b"h:\xff", b""),
        (b"h:a", b"\xff"),
        (b"schema_version", b"0"),
        (b"schema_version", b"one"),
        (b"schema_version", b"2147483648"),
        (b"topic", b"t" * 2049),
        (b"topic", "ä".encode() * 1025),
    ):
        field = "headers" if name.startswith(b"h:") else name.decode()
        with pytest.raises(InvalidMessageError, match=f"message {field} "):
            from_fields({**SOUND, name: value})
