"""Foreign bytes are stored as text from which they can be restored."""

import json

from hypothesis import given
from hypothesis import strategies as st

from pillarbox.outbox.cloudevents.fields import unreadable_from_fields
from pillarbox.outbox.cloudevents.raw_text import (
    bytes_of,
    payload_of,
    storable,
    text_of,
)


@given(st.binary() | st.text().map(str.encode))
def test_bytes_are_recovered_from_the_text(data: bytes) -> None:
    text = text_of(data)
    assert bytes_of(text) == data
    assert "\0" not in text


def test_text_stays_readable_and_is_distinguished_from_bytes_in_base64() -> None:
    for text in ("", "plain", "ä\n", "base64,AA==", "\ufffd"):
        assert text_of(text.encode()) == text
    bytes_in_base64 = text_of(b"\xff")
    assert bytes_in_base64 == "data:;base64,/w=="
    assert text_of(bytes_in_base64.encode()) != bytes_in_base64


def test_without_a_payload_field_all_fields_become_the_payload() -> None:
    fields = {b"data": b"\xff\x00raw", "ä".encode(): b"text", b"\xfe": b""}
    foreign = unreadable_from_fields("orders", fields)
    assert foreign.payload == payload_of(fields)
    assert foreign.content_type == "application/json"
    found = json.loads(foreign.payload)
    assert found["ä"] == "text"
    assert {bytes_of(n): bytes_of(v) for n, v in found.items()} == fields
    assert foreign.headers == found


def test_a_payload_is_kept_byte_for_byte_whatever_the_other_fields() -> None:
    foreign = unreadable_from_fields("orders", {b"ce_data": b"\xff", b"ce_id": b"\xfe"})
    assert foreign.payload == b"\xff"
    assert foreign.headers == {"ce_id": text_of(b"\xfe")}


@given(st.text(st.characters() | st.sampled_from("\0\ud800")))
def test_any_text_can_be_stored_and_valid_text_stays_unchanged(
    text: str,
) -> None:
    stored = storable(text)
    assert "\0" not in stored
    assert stored.encode().decode() == stored
    sound = "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)
    assert (stored == text) is sound


def test_escaped_text_is_readable() -> None:
    assert storable("no\0such \ud800") == r"no\0such \ud800"
