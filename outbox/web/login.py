"""Viewers: logins by token, and protection against forged forms."""

import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import Response

from outbox.bounded_dict import BoundedDict
from outbox.errors import ConfigError, shorten

LOGIN_COOKIE: Final = "pillarbox_login"
FORM_COOKIE: Final = "pillarbox_form"
FORM_FIELD: Final = "form_token"

# Too long to be guessed, so that failed logins need no limit.
_SHORTEST: Final = 16
_LIFETIME: Final = 12 * 3600
_MAX_NAME: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Someone who is looking at the page.

    Attributes:
        name: the name recorded with everything that the viewer does.
        may_act: whether this viewer may retry and discard dead letters, and cancel
            jobs.
        sees_payloads: whether payloads, headers and stack traces are shown to this
            viewer.
    """

    name: str
    may_act: bool = False
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
    """Read a token file with one line per viewer: `NAME TOKEN [act] [payloads]`.

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
        if not rest or rights - {"act", "payloads"} or len(name) > _MAX_NAME:
            raise ConfigError(
                f"token file {path}, line {number}: write NAME TOKEN, and what else "
                "the viewer may do: act, payloads"
            )
        if rest[0] in viewers:
            raise ConfigError(
                f"token file {path}, line {number}: {viewers[rest[0]].name} has the "
                "same token; give each viewer another one"
            )
        viewers[rest[0]] = Viewer(
            name=name, may_act="act" in rights, sees_payloads="payloads" in rights
        )
    return viewers


def set_cookie(
    response: Response, connection: HTTPConnection, name: str, value: str
) -> None:
    """Set a cookie that scripts can't read and other sites' requests don't carry."""
    response.set_cookie(
        name,
        value,
        path=connection.scope.get("root_path") or "/",
        httponly=True,
        samesite="strict",
        secure=connection.url.scheme == "https",
    )


class FormTokens:
    """Proves that this page created a form for the browser that submits it.

    Args:
        key: a secret that all processes which serve the page share, since a form can be
            submitted to another process than the one that created it.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def token(self, cookie: str, viewer: str) -> str:
        """Return the token that a form must contain in the browser with this cookie."""
        return hmac.new(self._key, repr((cookie, viewer)).encode(), sha256).hexdigest()

    def is_ours(
        self, connection: HTTPConnection, viewer: str, given: str | None
    ) -> bool:
        """Return whether a form came from this page, as rendered for this viewer."""
        headers = connection.headers
        if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return False
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return False
        cookie = connection.cookies.get(FORM_COOKIE)
        return bool(cookie and given) and hmac.compare_digest(
            self.token(cookie or "", viewer).encode(), (given or "").encode()
        )


def new_form_cookie() -> str:
    """Return a value for the cookie that forms are tied to."""
    return secrets.token_urlsafe(24)
