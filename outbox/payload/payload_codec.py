"""Payload codecs: encryption or compression from `add` to the relay or the handler.

The application encodes payloads when it adds messages. Tables, dead letters and, unless
the relay decodes, the broker hold the encoded payload; two headers say how to decode
it:

    pillarbox-codec: aes-gcm:2026-11          the codec, and the id of its key
    pillarbox-content-type: application/json  the content type when decoded

Topic, key and headers are not encoded: put secrets into the payload only.
"""

import re
from typing import Final, Protocol, runtime_checkable

from pillarbox.outbox.errors import CodecError, ConfigError, shorten
from pillarbox.outbox.import_path import import_object
from pillarbox.outbox.message import Message
from pillarbox.outbox.payload.json_codec import BINARY

CODEC_HEADER: Final = "pillarbox-codec"
CONTENT_TYPE_HEADER: Final = "pillarbox-content-type"

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]*")


@runtime_checkable
class PayloadCodec(Protocol):
    """Encodes and decodes payloads. Must be safe to share between threads.

    If it has an attribute `strict` that is true, payloads must be encoded.
    """

    @property
    def name(self) -> str:
        """The codec's name: lower-case letters, digits, `.` and `-`."""

    def encode(self, message: Message) -> tuple[str, bytes]:
        """Return the id of the key that was used, and the payload to store."""

    def decode(self, message: Message, key_id: str) -> bytes:
        """Return the original payload of a message whose payload `encode` returned.

        Only the id of the message is certain to be unchanged; a broker may have changed
        the rest.

        Raises:
            LookupError: there is no key with that id any more.
            Exception: the payload can't be decoded.
        """


def is_encoded(message: Message) -> bool:
    """Return whether a payload has to be decoded before it is read."""
    return CODEC_HEADER in message.headers


def why_unreadable(message: Message, remedy: str) -> str | None:
    """Return why a process without a codec can't read a message; None: it can."""
    if not is_encoded(message):
        return None
    name = message.headers[CODEC_HEADER].partition(":")[0]
    return (
        f"the payload is encoded by codec {shorten(name)}, but this process has no"
        f" codec: {remedy}"
    )


def encoded(message: Message, codec: PayloadCodec) -> Message:
    """Return the message with its payload encoded.

    Raises:
        CodecError: the codec failed, or the payload is already encoded.
    """
    if is_encoded(message):
        raise CodecError(
            "headers",
            {CODEC_HEADER: message.headers[CODEC_HEADER]},
            "means that the payload is already encoded",
            "decode it first, or add it without a codec",
        )
    name = name_of(codec)
    try:
        key_id, payload = codec.encode(message)
    except Exception as error:
        # Only the type of the error: its message may quote the payload.
        raise CodecError(
            "payload",
            f"{len(message.payload)} bytes",
            f"can't be encoded by codec {name!r} ({type(error).__name__})",
            "see the error above, and give the codec a key to encode with",
        ) from error
    headers = {
        **message.headers,
        CODEC_HEADER: f"{name}:{key_id}",
        CONTENT_TYPE_HEADER: message.content_type,
    }
    return message.replace(payload=payload, content_type=BINARY, headers=headers)


def decoded(message: Message, codec: PayloadCodec) -> Message:
    """Return the message as it was before `encoded`; unchanged if it isn't encoded.

    Raises:
        CodecError: it isn't encoded and the codec is strict, the key is missing,
            another codec encoded the payload, or it isn't what the codec returned.
    """
    header = message.headers.get(CODEC_HEADER)
    if header is None:
        if getattr(codec, "strict", False):
            raise CodecError(
                "headers",
                sorted(message.headers),
                f"lack {CODEC_HEADER}: the payload isn't encoded, and the codec is"
                " strict",
                "find out who added it without the codec",
            )
        return message
    name, _, key_id = header.partition(":")
    if name != name_of(codec):
        raise CodecError(
            "headers",
            {CODEC_HEADER: header},
            f"names another codec than {name_of(codec)!r}, the codec of this process",
            "give this process the codec that the message was added with",
        )
    try:
        payload = codec.decode(message, key_id)
    except LookupError as error:
        raise CodecError(
            "headers",
            {CODEC_HEADER: header},
            f"names a key that codec {name!r} doesn't have",
            f"give it the key {shorten(key_id)}, then retry the dead letter",
        ) from error
    except Exception as error:
        raise CodecError(
            "payload",
            f"{len(message.payload)} bytes",
            f"can't be decoded by codec {name!r} with the key {shorten(key_id)}"
            f" ({type(error).__name__})",
            "it was changed in transit, or that key is not the one it was added with",
        ) from error
    headers = {
        header: value
        for header, value in message.headers.items()
        if header not in {CODEC_HEADER, CONTENT_TYPE_HEADER}
    }
    content_type = message.headers.get(CONTENT_TYPE_HEADER) or BINARY
    return message.replace(payload=payload, content_type=content_type, headers=headers)


def name_of(codec: PayloadCodec) -> str:
    """Return the codec's name.

    Raises:
        ConfigError: the name can't be written into a header.
    """
    if not _NAME.fullmatch(codec.name):
        raise ConfigError(
            f"codec name {shorten(codec.name)}: use lower-case letters, digits, . and -"
        )
    return codec.name


def load_codec(path: str) -> PayloadCodec:
    """Import the codec that `module:name` names.

    Raises:
        ConfigError: as for `import_object`, or the object isn't a codec.
    """
    found = import_object("codec", path)
    if not isinstance(found, PayloadCodec) or isinstance(found, type):
        raise ConfigError(
            f"codec {path!r}: must be an object with name, encode and decode, not a"
            f" {type(found).__name__}"
        )
    name_of(found)
    return found
