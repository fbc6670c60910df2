"""Payloads are encoded and decoded; a failure names its cause and a remedy."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from typing_extensions import override

from examples.sealed.aes_gcm import AesGcm
from pillarbox import Message
from pillarbox.outbox.errors import CodecError, ConfigError
from pillarbox.outbox.payload.payload_codec import (
    CODEC_HEADER,
    PayloadCodec,
    decoded,
    encoded,
    is_encoded,
    load_codec,
)

SECRET = "the patient's name"
OLD, NEW = (AESGCM.generate_key(256) for _ in range(2))
codec = AesGcm({"2026-11": NEW, "2026-10": OLD})


@dataclass(frozen=True)
class Reversed:
    """A third-party codec, which chooses its own name."""

    name: str = "upside"

    def encode(self, message: Message) -> tuple[str, bytes]:
        return "", message.payload[::-1]

    def decode(self, message: Message, key_id: str) -> bytes:
        return message.payload[::-1]


def message(**changes: str) -> Message:
    return Message(
        "patients.admitted",
        {"name": SECRET},
        key="p-1",
        tenant="ward",
        headers={"traceparent": "00-1", **changes},
        schema_version=3,
    )


@pytest.mark.parametrize("with_codec", [codec, Reversed()], ids=lambda c: c.name)
def test_a_message_is_restored_unchanged(with_codec: PayloadCodec) -> None:
    plain = message()

    stored = encoded(plain, with_codec)

    assert is_encoded(stored)
    assert SECRET.encode() not in stored.payload
    assert stored.content_type == "application/octet-stream"
    assert (stored.id, stored.topic, stored.key) == (plain.id, plain.topic, plain.key)
    assert decoded(stored, with_codec) == plain
    assert decoded(plain, with_codec) is plain


def test_the_header_names_codec_and_key_and_old_keys_still_decode() -> None:
    old = encoded(message(), AesGcm({"2026-10": OLD}))
    new = encoded(message(), codec)

    assert old.headers[CODEC_HEADER] == "aes-gcm:2026-10"
    assert new.headers[CODEC_HEADER] == "aes-gcm:2026-11"
    assert decoded(old, codec).json() == decoded(new, codec).json() == {"name": SECRET}


def changed(payload: bytes | None = None, id: UUID | None = None) -> Message:
    stored = encoded(message(), codec)
    return Message(
        stored.topic,
        stored.payload if payload is None else payload,
        headers=stored.headers,
        id=id or stored.id,
    )


@pytest.mark.parametrize(
    ("attempt", "problem", "remedy"),
    [
        (
            lambda: decoded(encoded(message(), codec), AesGcm({"2026-12": NEW})),
            "names a key that codec 'aes-gcm' doesn't have",
            "give it the key '2026-11', then retry the dead letter",
        ),
        (
            lambda: decoded(encoded(message(), codec), AesGcm({"2026-11": OLD})),
            "can't be decoded by codec 'aes-gcm' with the key '2026-11' (InvalidTag)",
            "that key is not the one it was added with",
        ),
        (lambda: decoded(changed(payload=b"short"), codec), "can't be dec", "changed"),
        (
            lambda: decoded(changed(id=message().id), codec),
            *("(InvalidTag)", "it was changed in transit"),
        ),
        (
            lambda: decoded(encoded(message(), codec), Reversed()),
            *("names another codec than 'upside'", "the codec that the message was"),
        ),
        (
            lambda: encoded(encoded(message(), codec), codec),
            *("means that the payload is already encoded", "add it without a codec"),
        ),
    ],
)
def test_the_error_for_an_impossible_change_names_field_value_and_remedy(
    attempt: Callable[[], object], problem: str, remedy: str
) -> None:
    with pytest.raises(CodecError) as refused:
        attempt()

    assert problem in str(refused.value)
    assert remedy in str(refused.value)
    assert SECRET not in str(refused.value)


def test_the_error_of_a_codec_that_fails_to_encode_hides_the_payload() -> None:
    class Broken(Reversed):
        @override
        def encode(self, message: Message) -> tuple[str, bytes]:
            raise ValueError(f"what is {message.payload!r}?")

    with pytest.raises(CodecError, match=r"can't be encoded by .*\(ValueError\)") as it:
        encoded(message(), Broken())
    assert SECRET not in str(it.value)


def test_a_codec_name_that_does_not_fit_into_a_header_is_refused() -> None:
    for name in ("", "a:b", "Upper", "a b"):
        with pytest.raises(ConfigError, match="use lower-case letters"):
            encoded(message(), Reversed(name))


def test_a_codec_is_found_by_module_and_name() -> None:
    assert load_codec(f"{__name__}:codec") is codec
    for path, problem in (
        ("codec", "write module:name"),
        ("no.such:codec", "No module named 'no' in"),
        ("examples.sealed.aes_gcm:nothing", "'nothing' is not in examples"),
        ("examples.sealed.aes_gcm:AesGcm", "must be an object with name, encode"),
        ("os:sep", "must be an object with name, encode and decode, not a str"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_codec(path)


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [f"{i}:{base64.b64encode(k).decode()}" for i, k in (("b", NEW), ("a", OLD))]
    monkeypatch.setenv("PILLARBOX_KEYS", ",".join(pairs))

    stored = encoded(message(), AesGcm.from_environment())

    assert stored.headers[CODEC_HEADER] == "aes-gcm:b"
    assert decoded(stored, AesGcm({"b": NEW})).json() == {"name": SECRET}


@pytest.mark.parametrize("keys", [{}, {"a": b"short"}])
def test_invalid_keys_are_refused(keys: dict[str, bytes]) -> None:
    with pytest.raises(ConfigError, match="key"):
        AesGcm(keys)
