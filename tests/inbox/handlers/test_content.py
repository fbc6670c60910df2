"""A payload must match its content type, as far as that can be checked."""

import pytest

from inbox.errors import DeadLetter
from inbox.handlers.upcasting import check_content
from outbox.payload.json_codec import is_json
from pillarbox import Message

GZIPPED = b"\x1f\x8b\x08\x00"


@pytest.mark.parametrize(
    ("content_type", "payload"),
    [
        ("application/json", b"{"),
        ("application/json", b""),
        ("application/json", b"\xff{}"),
        ("application/json; charset=utf-8", b"not this"),
        ("application/JSON", b"not this"),
        ("application/cloudevents+json", b"not this"),
        ("application/json", b"[" * 100_000),
        ("text/plain; charset=utf-8", b"\xff"),
        ('text/csv; header=present; charset="US-ASCII"', "ä".encode()),
        ("Text/HTML;charset=utf-16", b"odd"),
    ],
)
def test_a_payload_that_contradicts_its_content_type_is_refused(
    content_type: str, payload: bytes
) -> None:
    message = Message("orders", payload, content_type=content_type)
    with pytest.raises(DeadLetter, match="doesn't match its content type '") as refused:
        check_content(message)
    assert content_type in str(refused.value)


@pytest.mark.parametrize(
    ("content_type", "payload"),
    [
        ("application/json", b'{"a": 1}'),
        ("application/json", b"null"),
        ("application/json", '"ä"'.encode("utf-16")),
        ("application/jsonish", b"{"),
        ("application/octet-stream", b"\xff"),
        ("text/plain; charset=utf-8", "ä".encode()),
        ("text/plain; charset=latin-1", b"\xff"),
        ("text/plain; charset=klingon", b"\xff"),
        ("text/plain; charset=base64", b"\xff"),
        ("text/plain", b"\xff"),
        ("image/png", b"\xff"),
        ("", b"\xff"),
    ],
)
def test_a_payload_that_could_match_its_content_type_is_accepted(
    content_type: str, payload: bytes
) -> None:
    check_content(Message("orders", payload, content_type=content_type))


@pytest.mark.parametrize("content_type", ["application/json", "text/a; charset=utf-8"])
def test_a_payload_with_a_content_encoding_is_not_checked(content_type: str) -> None:
    headers = {"Content-Encoding": "gzip"}
    check_content(
        Message("orders", GZIPPED, content_type=content_type, headers=headers)
    )


def test_the_identity_encoding_does_not_excuse_invalid_json() -> None:
    headers = {"content-encoding": "identity"}
    with pytest.raises(DeadLetter):
        check_content(
            Message("orders", GZIPPED, content_type="application/json", headers=headers)
        )


def test_json_content_types_are_recognized() -> None:
    assert is_json("application/json")
    assert is_json("application/problem+json; charset=utf-8")
    assert not is_json("text/plain; is=application/json")
