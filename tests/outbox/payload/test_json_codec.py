"""The JSON codec: the values it accepts, and its errors for all others."""

from typing import Any

import pytest

from outbox.errors import CodecError
from outbox.payload.json_codec import decode, encode
from pillarbox import InvalidMessageError, Message


def circle() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


def well() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    "payload",
    [
        object(),
        {"at": 1j},
        float("nan"),
        {"a": [float("inf")]},
        "lone \ud800 surrogate",
        {("a", "b"): 1},
        bytearray(b"not quite bytes"),
        circle(),
        well(),
    ],
    ids=lambda payload: type(payload).__name__,
)
def test_the_error_for_an_unencodable_payload_has_a_remedy(
    payload: object,
) -> None:
    with pytest.raises(CodecError) as refusal:
        Message("orders.placed", payload)

    assert isinstance(refusal.value, InvalidMessageError)
    assert refusal.value.field == "payload"
    assert type(payload).__name__ in str(refusal.value)
    assert "can't be encoded as JSON" in str(refusal.value)
    assert "@jsonable.register, or pass bytes" in str(refusal.value)


def test_an_encoded_value_is_decoded_again_and_other_text_is_refused() -> None:
    for value in (None, True, 0, -1.5, "", "ä😀\u2028", [], {}, {"a": [{"b": None}]}):
        assert decode(encode(value)) == value
    for text in (b"", b"{", b"\xff\xfe\xfd", b"[" * 100_000):
        with pytest.raises(CodecError, match="isn't JSON"):
            decode(text)


def test_an_error_does_not_show_a_long_value_in_full() -> None:
    error = InvalidMessageError("key", "k" * 1000, "is long", "shorten it")

    assert len(str(error)) < 120
    assert "…" in str(error)
