"""The options of a broker URL, declared once for the relay and the consumer.

Each broker has a frozen dataclass of its options. One URL serves both sides: each side
reads all options and uses its own. Options that the dataclass doesn't declare stay in
the URL, for the client library or, with webhooks, for the receiver.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from ipaddress import ip_address
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self
from urllib.parse import quote, unquote, urlsplit

from pillarbox.outbox.duration import exact_duration, read_duration
from pillarbox.outbox.errors import ConfigError, UnknownImplementationError, shorten
from pillarbox.outbox.url import scheme_of, split, without_password, without_secrets

GROUP: Final = "pillarbox.broker_options"
DIRECT: Final = "direct"
"""The broker of readers whose messages consumers read themselves."""
Side = Literal["relay", "consumer", "both"]
_METADATA: Final = "option"


@dataclass(frozen=True, slots=True)
class Form:
    """How an option's value is written, and which values are allowed.

    Attributes:
        description: the expected form, phrased to follow the word "write".
        read: returns the value; raises ValueError if the text is malformed.
        allows: returns whether a value is allowed.
        write: returns a value as text that `read` reads back.
    """

    description: str
    read: Callable[[str], Any] = str
    allows: Callable[[Any], object] = bool
    write: Callable[[Any], str] = str

    @classmethod
    def number(cls, least: int = 1, most: int | None = None) -> Self:
        """Allow whole numbers within these bounds."""
        end = "" if most is None else f" to {most}"
        return cls(
            f"a whole number from {least}{end}",
            _digits,
            lambda value: least <= value and (most is None or value <= most),
        )

    @classmethod
    def duration(
        cls,
        least: timedelta | None = None,
        most: timedelta | None = None,
        *,
        whole: bool = False,
    ) -> Self:
        """Allow durations, such as `90s`; with `whole`, in whole seconds."""
        kind = "whole seconds" if whole else "a duration"
        bounds = "" if least is None else f" from {exact_duration(least)}"
        bounds += "" if most is None else f" to {exact_duration(most)}"

        def allows(value: timedelta) -> bool:
            return (
                (value > timedelta(0) if least is None else value >= least)
                and (most is None or value <= most)
                and not (whole and value % timedelta(seconds=1))
            )

        return cls(
            f"{kind}{bounds or ' above 0'}, such as 30s or 2m",
            partial(read_duration, ""),
            allows,
            exact_duration,
        )

    @classmethod
    def flag(cls) -> Self:
        """Allow `true` and `false`, and nothing else."""
        return cls(
            "true or false",
            lambda text: _FLAGS.get(text, text),
            lambda value: isinstance(value, bool),
            lambda value: "true" if value else "false",
        )

    @classmethod
    def choice(cls, *words: str) -> Self:
        """Allow a few words."""
        return cls(f"one of {', '.join(words)}", allows=lambda value: value in words)

    @classmethod
    def text(
        cls, description: str = "a text", test: Callable[[str], object] = bool
    ) -> Self:
        """Allow any text that isn't empty and passes a test."""
        return cls(description, allows=lambda value: bool(value) and bool(test(value)))

    @classmethod
    def names(cls, description: str = "names, separated by commas") -> Self:
        """Allow several names, separated by commas."""
        return cls(
            description,
            lambda text: tuple(name for name in text.split(",") if name),
            lambda value: value and all(name and "," not in name for name in value),
            ",".join,
        )


_FLAGS: Final = {"true": True, "false": False}


def _digits(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise ValueError
    return int(text)


class Option(NamedTuple):
    """A declared option.

    Attributes:
        default: the default as shown, in Markdown; None: as it is written.
        help: its purpose, in Markdown.
    """

    form: Form
    side: Side
    default: str | None
    help: str


def option(
    form: Form,
    default: Any = None,
    *,
    side: Side,
    help: str,
    shown: str | None = None,
) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        form: how its value is written.
        default: its value if the URL omits it.
        side: the side that uses it; the other side ignores it.
        help: its purpose, in Markdown.
        shown: the default as the table shows it, if that differs from how it is
            written.
    """
    return field(default=default, metadata={_METADATA: Option(form, side, shown, help)})


FILE: Final = Form.text("the name of a file")


def payload_limit(
    default: int | None = None, *, shown: str | None = None, more: str = ""
) -> Any:
    """Declare the largest payload that a relay publishes."""
    help = f"a larger payload becomes a dead letter{more}"
    return option(Form.number(), default, side="relay", help=help, shown=shown)


@dataclass(frozen=True, kw_only=True)
class BrokerOptions:
    """The base class of a broker's options.

    Attributes:
        schemes: the schemes of its URLs.
        client: options that the client library reads itself, by name.
        refused: options that are rejected, each with the remedy.
        closed: whether to reject options that are neither declared nor among
            `client_names`.
        ports: the default port of each scheme, for schemes that lead to the same
            broker, such as those with and without TLS.
        destination: the options that decide where a message goes; None for all.
    """

    schemes: ClassVar[tuple[str, ...]]
    client: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar[Mapping[str, str]] = {}
    closed: ClassVar[bool] = True
    ports: ClassVar[Mapping[str, int]] = {}
    destination: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def client_names(cls) -> Collection[str]:
        """Return the names of the options that the client library accepts."""
        return cls.client

    @classmethod
    def parse(cls, url: str) -> tuple[str, Self]:
        """Parse the options in a URL; return the URL without them, and the options.

        Raises:
            ConfigError: an option is unknown, given twice, or has an invalid value. The
                message names the option and contains no password.
        """
        start, _, query = url.partition("?")
        known = dict(declared(cls))
        values: dict[str, Any] = {}
        rest = []
        for part in filter(None, query.split("&")):
            quoted, _, text = part.partition("=")
            name = unquote(quoted)
            if "@" in query and cls.closed and name not in cls.client_names():
                # The query may be part of a password that contains a question mark.
                raise ConfigError(
                    f"broker URL {without_password(url)}: its options can't be read; "
                    "write ? as %3F and @ as %40"
                )
            if name in cls.refused:
                raise ConfigError(f"broker URL option {name}: {cls.refused[name]}")
            if name not in known:
                if cls.closed and name not in cls.client_names():
                    raise cls.unknown(url, name)
                rest.append(part)
            elif name in values:
                raise ConfigError(f"broker URL option {name}: given twice")
            else:
                shown = "…" if "@" in query else shorten(without_secrets(unquote(text)))
                values[name] = _read(known[name].form, unquote(text), name, shown)
        return "?".join([start, "&".join(rest)] if rest else [start]), cls(**values)

    @classmethod
    def identity(cls, url: str) -> str:
        """Return what decides where messages go, without credentials.

        Relays of one database must have the same. The order and the case of hosts, a
        default port and TLS make no difference.

        Raises:
            ConfigError: the URL is invalid.
        """
        rest, options = cls.parse(url)
        parts = split(rest)
        port = cls.ports.get(parts.scheme)
        scheme = next(iter(cls.ports)) if port else parts.scheme
        hosts = parts.netloc.rpartition("@")[2].split(",")
        place = cls.place(parts.path, parts.query)
        chosen = options.query(cls.destination)
        return (
            f"{scheme}://{','.join(sorted({_host(host, port) for host in hosts}))}"
            f"{place}{'?' if chosen else ''}{chosen}"
        )

    @classmethod
    def place(cls, path: str, query: str) -> str:
        """Return what a URL says beyond host and options about where messages go.

        Args:
            query: what isn't declared here; by default it counts, as a hash, because
                it may contain secrets.
        """
        query = "&".join(sorted(query.split("&")))
        digest = hashlib.sha256(query.encode()).hexdigest()[:8] if query else ""
        return f"{path if path != '/' else ''}{'#' if digest else ''}{digest}"

    @classmethod
    def unknown(cls, url: str, name: str) -> ConfigError:
        """Return the error about an unknown option."""
        names = [*(name for name, _ in declared(cls)), *cls.client]
        known = f"the options are {', '.join(names)}" if names else "it has no options"
        known += "" if cls.closed else ", and those of the client library"
        return ConfigError(
            f"broker URL {without_password(url)}: unknown option "
            f"{shorten(name)}; {known}"
        )

    def query(self, names: Collection[str] | None = None) -> str:
        """Return options that differ from their defaults, as a URL query.

        Args:
            names: the only ones to return.
        """
        return "&".join(
            f"{name}={quote(it.form.write(getattr(self, name)), safe=',:/')}"
            for name, it in declared(type(self))
            if getattr(self, name) != getattr(type(self), name)
            and (names is None or name in names)
        )


def options_of(broker: str) -> type[BrokerOptions]:
    """Return the options of a broker, by its name or by a scheme of its URLs.

    This needs neither the client library nor a server.

    Raises:
        UnknownImplementationError: there is no such broker; the message lists the
            installed ones.
    """
    found = brokers()
    for name, options in found.items():
        if broker == name or broker in options.schemes:
            return options
    raise UnknownImplementationError(
        f"no broker {shorten(broker)}; installed: {', '.join(found) or 'none'}"
    )


def identity_of(url: str) -> str:
    """Return the identity of a broker by its URL, whichever adapter reads it.

    Raises:
        ConfigError: the URL is invalid.
    """
    scheme = scheme_of(url)
    if not scheme or "://" not in url:
        raise ConfigError("broker: must be a URL, such as https://example.com/hooks")
    try:
        options = options_of(scheme)
    except UnknownImplementationError:
        options = _Undeclared
    return options.identity(url)


def brokers() -> dict[str, type[BrokerOptions]]:
    """Return the options of every installed broker, by broker name."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: point.load() for point in points}


@dataclass(frozen=True, kw_only=True)
class _Undeclared(BrokerOptions):
    """The options of an adapter that declares none: any of them may matter."""

    closed: ClassVar[bool] = False


def _host(address: str, default_port: int | None) -> str:
    parts = urlsplit(f"//{address}")
    host = (parts.hostname or "").removesuffix(".")
    if ":" in host:
        host = f"[{ip_address(host).compressed}]"
    return host if parts.port in {None, default_port} else f"{host}:{parts.port}"


def declared(options: type[BrokerOptions]) -> Iterator[tuple[str, Option]]:
    """Yield the options that a broker declares, by name."""
    return ((f.name, f.metadata[_METADATA]) for f in fields(options))


def _read(form: Form, text: str, name: str, shown: str) -> Any:
    with suppress(ValueError):
        value = form.read(text)
        if text and form.allows(value):
            return value
    raise ConfigError(f"broker URL option {name}={shown}: write {form.description}")
