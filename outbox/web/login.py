"""Viewers: logins by token, and protection against forged forms."""

import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.errors import ConfigError, shorten

LOGIN_COOKIE: Final = "pillarbox_login"

# Too long to be guessed, so that failed logins need no limit.
_SHORTEST: Final = 16
_LIFETIME: Final = 12 * 3600
_MAX_NAME: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Someone who is looking at the page.

    Attributes:
        name: the name recorded with everything that the viewer does.
        may_act: whether this viewer may retry and discard dead letters, cancel jobs,
            and cancel or move scheduled messages.
        may_pause: whether this viewer may pause and resume consumers and topics.
        sees_payloads: whether payloads, headers and stack traces are shown to this
            viewer.
    """

    name: str
    may_act: bool = False
    may_pause: bool = False
    sees_payloads: bool = False


Identify: TypeAlias = Callable[
    [HTTPConnection], "Viewer | Awaitable[Viewer | None] | None"
]
"""Returns who sent a request; None if the sender may not see the page."""


class TokenLogin:
    """Logins by token, which are kept in this process for 12 hours.

    A login ends earlier when its viewer logs out or the process ends. For one event
    loop.

    Args:
        viewers: the viewers by token.

    Raises:
        ConfigError: a token is too short to be a secret, or there are no tokens.
    """

    def __init__(self, viewers: Mapping[str, Viewer]) -> None:
        if not viewers:
            raise ConfigError("no token given: nobody could log in")
        for token, viewer in viewers.items():
            if len(token) < _SHORTEST:
                raise ConfigError(
                    f"the token of {shorten(viewer.name)} has {len(token)} characters:"
                    f" use at least {_SHORTEST}, as openssl rand -hex 24 makes them"
                )
        self._viewers = dict(viewers)
        self._logins: BoundedDict[str, tuple[Viewer, float]] = BoundedDict()

    def accept(self, token: str) -> str | None:
        """Return the value of the login cookie; None if the token is unknown."""
        given, found = token.strip().encode(errors="replace"), None
        for known, viewer in self._viewers.items():
            if hmac.compare_digest(known.encode(), given):
                found = viewer
        if found is None:
            return None
        cookie = secrets.token_urlsafe(24)
        self._logins[cookie] = found, time.monotonic() + _LIFETIME
        return cookie

    def __call__(self, connection: HTTPConnection) -> Viewer | None:
        """Return the viewer whose login cookie a request contains; None without one."""
        cookie = connection.cookies.get(LOGIN_COOKIE, "")
        viewer, until = self._logins.get(cookie, (None, 0.0))
        return viewer if time.monotonic() < until else None

    def end(self, connection: HTTPConnection) -> None:
        """End the login whose cookie a request contains."""
        self._logins.pop(connection.cookies.get(LOGIN_COOKIE, ""), None)


def read_tokens(path: str) -> dict[str, Viewer]:
    """Read a token file with a line per viewer: `NAME TOKEN [act] [pause] [payloads]`.

    Raises:
        ConfigError: the file can't be read, or a line is malformed.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"token file {path}: {error}; let it name a text file that this user may "
            "read"
        ) from error
    viewers: dict[str, Viewer] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, *rest = words
        rights = set(rest[1:])
        if not rest or rights - {"act", "pause", "payloads"} or len(name) > _MAX_NAME:
            raise ConfigError(
                f"token file {path}, line {number}: write NAME TOKEN, and what else "
                "the viewer may do: act, pause, payloads"
            )
        if rest[0] in viewers:
            raise ConfigError(
                f"token file {path}, line {number}: {viewers[rest[0]].name} has the "
                "same token; give each viewer another one"
            )
        viewers[rest[0]] = Viewer(
            name=name,
            may_act="act" in rights,
            may_pause="pause" in rights,
            sees_payloads="payloads" in rights,
        )
    return viewers


def is_from_elsewhere(connection: HTTPConnection) -> bool:
    """Return whether another site made the browser send this request.

    Every browser says so in one of two headers; other clients send neither, and no
    cookie that someone else could make them send.
    """
    headers = connection.headers
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in {"same-origin", "none"}
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")
