"""Prepare a handler's message: a valid payload, in the version that it understands.

v1 ──upcaster to 2──▶ v2 ──upcaster to 3──▶ v3 ──▶ handler of version 3
v4 ──▶ handed back to a replica that understands it; after a while a dead letter
"""

import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from pillarbox.inbox.errors import DeadLetter
from pillarbox.inbox.handlers.arguments import reader_of
from pillarbox.inbox.handlers.terms import as_failure
from pillarbox.inbox.idempotent import readable
from pillarbox.outbox.errors import (
    CodecError,
    ConfigError,
    InvalidMessageError,
    one_line,
    shorten,
)
from pillarbox.outbox.message import Message
from pillarbox.outbox.payload import json_codec as codec
from pillarbox.outbox.payload.payload_codec import PayloadCodec, why_unreadable
from pillarbox.outbox.payload.schema_registry import SchemaRegistry

Upcaster: TypeAlias = Callable[[Any], object]
"""Takes a message, or its payload as its annotation says; returns the payload of the
next version: bytes, or an object to encode as JSON."""


class Versions:
    """The version that the handler of each topic understands, and its upcasters.

    Args:
        registry: the schemas that messages must match before a handler gets them.
        codec: decodes an encoded payload first.
    """

    def __init__(
        self, registry: SchemaRegistry, codec: PayloadCodec | None = None
    ) -> None:
        self._registry = registry
        self._codec = codec
        self._understood: dict[str, int | None] = {}
        self._upcasters: dict[str, dict[int, Upcaster]] = {}
        self._decoded: set[str] = set()
        self._readers: dict[Upcaster, Callable[[Message], Any]] = {}

    def understands(self, topic: str, version: int | None) -> None:
        """Record the version that the handler of a topic understands; None means any.

        Raises:
            ConfigError: it is not a version.
        """
        if version is not None:
            _check(version, 1)
        self._understood[topic] = version

    def understood(self, topic: str) -> int | None:
        """Return the version that the handler of a topic understands; None: any."""
        return self._understood[topic]

    def decodes(self, topic: str, model: type | None) -> None:
        """Record that the handler of a topic gets its payloads decoded.

        Args:
            model: the class of the decoded payloads, if they have one.

        Raises:
            ConfigError: the registry has another class for the topic and the version,
                and this one for others, so that no message would fit.
        """
        bound = None if model is None else self._registry.topic_of(model)
        version = self._understood[topic]
        known = self._registry.classes(topic, version)
        if model is not None and bound is not None and known and model not in known:
            which = "" if version is None else f" in version {version}"
            raise ConfigError(
                f"topic {shorten(topic)}{which}: its handler takes {model.__name__},"
                f" which is registered for topic {shorten(bound[0])}, version"
                f" {bound[1]}; use that topic and version, or this topic's class"
            )
        self._decoded.add(topic)

    def add(self, topic: str, to: int, upcaster: Upcaster) -> None:
        """Register an upcaster of a topic from version `to - 1` to version `to`.

        Raises:
            ConfigError: it is already registered, or there is no version below `to`.
        """
        _check(to, 2)
        known = self._upcasters.setdefault(topic, {})
        if to in known:
            raise ConfigError(
                f"topic {shorten(topic)}: already has an upcaster to version {to}:"
                f" {_name(known[to])}"
            )
        known[to] = upcaster
        self._readers[upcaster] = reader_of(upcaster)

    def check(self) -> None:
        """Refuse incomplete chains of upcasters. Call it once all are registered.

        Raises:
            ConfigError: a step is missing or leads beyond the handler's version, or no
                handler declares a version.
        """
        for topic, known in self._upcasters.items():
            version = self._understood.get(topic)
            if version is None:
                raise ConfigError(
                    f"topic {shorten(topic)}: has upcasters but no handler with a"
                    f" version; register one with handles({topic!r},"
                    f" version={max(known)})"
                )
            if max(known) > version:
                raise ConfigError(
                    f"topic {shorten(topic)}: has an upcaster to version"
                    f" {max(known)}, but its handler understands {version}; raise the"
                    " handler's version"
                )
            for step in range(min(known), version + 1):
                if step not in known:
                    raise ConfigError(
                        f"topic {shorten(topic)}: no upcaster to version {step},"
                        f" between {min(known) - 1} and {version}; register one with"
                        f" upcasts({topic!r}, to={step})"
                    )

    def upcast(self, topic: str, message: Message) -> Message:
        """Return a message in the version that the handler of `topic` understands.

        Raises:
            DeadLetter: it can't be decoded, doesn't match its content type, or is newer
                than the handler; an upcaster is missing or raised; or the result
                doesn't match its schema.
        """
        if (encoded := self.why_encoded(message)) is not None:
            raise DeadLetter(encoded)
        if self._codec is not None:
            message = readable(message, self._codec)
        if topic not in self._decoded and not self._registry.knows(message):
            check_content(message)
        version = self._understood[topic]
        if version is not None and message.schema_version != version:
            message = self._upcast(topic, message, version)
        if self._registry.knows(message):
            try:
                self._registry.load(message)
            except InvalidMessageError as error:
                raise DeadLetter(str(error)) from error
        return message

    def why_encoded(self, message: Message) -> str | None:
        """Return why no handler can read a message; None: one can."""
        if self._codec is not None:
            return None
        return why_unreadable(message, "pass one, Consumer(…, codec=codec)")

    def why_too_new(self, topic: str, message: Message) -> str | None:
        """Return why the handler of `topic` can't take a message; None: it can."""
        version = self._understood[topic]
        if version is None or message.schema_version <= version:
            return None
        return (
            f"schema_version {message.schema_version} is newer than the handler of"
            f" {topic!r} understands ({version}); retry it once a newer handler is"
            " deployed"
        )

    def _upcast(self, topic: str, message: Message, version: int) -> Message:
        if (too_new := self.why_too_new(topic, message)) is not None:
            raise DeadLetter(too_new)
        known = self._upcasters.get(topic, {})
        for step in range(message.schema_version + 1, version + 1):
            if step not in known:
                raise DeadLetter(
                    f"schema_version {message.schema_version} is older than {version}, "
                    f"which the handler of {topic!r} understands, and there is no "
                    f"upcaster to version {step}"
                )
            try:
                with as_failure():
                    payload = known[step](self._readers[known[step]](message))
                message = message.replace(
                    payload=payload, schema_version=message.schema_version + 1
                )
            except Exception as error:
                raise DeadLetter(
                    f"upcaster {_name(known[step])} to version {step}: "
                    f"{one_line(error)}"
                ) from error
        return message


def _check(version: object, least: int) -> None:
    if type(version) is not int or version < least:
        raise ConfigError(
            f"version {shorten(version)}: must be a whole number from {least}"
        )


def _name(upcaster: Upcaster) -> str:
    return getattr(upcaster, "__qualname__", None) or repr(upcaster)


_CHARSET: Final = re.compile(
    r"text/.*;\s*charset=\"?([\w.:-]+)", re.ASCII | re.IGNORECASE
)


def check_content(message: Message) -> None:
    """Refuse invalid JSON, and text that isn't in its declared charset.

    Raises:
        DeadLetter: the reason says which, and where in the payload.
    """
    kind = message.content_type
    if kind == codec.BINARY:
        return
    problem: Exception | None = None
    try:
        if codec.is_json(kind):
            codec.decode(message.payload)
        elif declared := _CHARSET.match(kind):
            message.payload.decode(declared[1])
    except (CodecError, UnicodeError) as error:
        problem = error
    except LookupError:
        return  # an unknown charset
    if problem is not None and not _is_encoded(message):
        reason = problem.problem if isinstance(problem, CodecError) else str(problem)
        raise DeadLetter(
            f"the payload doesn't match its content type {shorten(kind)}: {reason}"
        )


def _is_encoded(message: Message) -> bool:
    return any(
        name.lower() == "content-encoding" and value.lower() != "identity"
        for name, value in message.headers.items()
    )
