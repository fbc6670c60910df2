"""Viewers: logins by token, and protection against forged forms."""

import hmac
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import Response

from outbox.errors import ConfigError, shorten

LOGIN_COOKIE: Final = "pillarbox_login"
FORM_COOKIE: Final = "pillarbox_form"
FORM_FIELD: Final = "form_token"

_SHORTEST: Final = 16
_LIFETIME: Final = 12 * 3600
_FAILURES: Final = 10
_PER_SECONDS: Final = 60.0
_MAX_NAME: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Someone who is looking at the page.

    Attributes:
        name: the name recorded with everything that the viewer does.
        may_act: whether this viewer may act, if the page allows actions.
        sees_payloads: whether payloads, headers and stack traces are shown to this
            viewer, if the page shows any.
    """

    name: str
    may_act: bool = False
    sees_payloads: bool = False


Identify: TypeAlias = Callable[
    [HTTPConnection], "Viewer | Awaitable[Viewer | None] | None"
]
"""Returns who sent a request; None if the sender may not see the page."""


class TokenLogin:
    """A login by token; it sets a cookie that is valid for 12 hours.

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
        # The key depends on the tokens only: logins survive a restart, and end when any
        # token is removed. No cookie reveals the key.
        self._key = sha256(
            b"\0".join([b"pillarbox login", *sorted(it.encode() for it in viewers)])
        ).digest()
        self._viewers = {self._sign(token): viewer for token, viewer in viewers.items()}
        self._failures: deque[float] = deque(maxlen=_FAILURES)

    @property
    def is_locked(self) -> bool:
        """Whether logins are rejected because too many failed in the last minute."""
        return (
            len(self._failures) == _FAILURES
            and time.monotonic() - self._failures[0] < _PER_SECONDS
        )

    def accept(self, token: str) -> str | None:
        """Return the value of the login cookie; None if the token is unknown."""
        if self.is_locked:
            return None
        given, found = self._sign(token.strip()), None
        for known in self._viewers:
            if hmac.compare_digest(known, given):
                found = known
        if found is None:
            self._failures.append(time.monotonic())
            return None
        said = f"{found}.{int(time.time())}"
        return f"{said}.{self._sign(said)}"

    def __call__(self, connection: HTTPConnection) -> Viewer | None:
        """Return the viewer whose login cookie a request contains; None without one."""
        said, _, signature = connection.cookies.get(LOGIN_COOKIE, "").rpartition(".")
        if not hmac.compare_digest(self._sign(said).encode(), signature.encode()):
            return None
        name, _, at = said.partition(".")
        if not 0 <= time.time() - int(at) < _LIFETIME:
            return None
        return self._viewers.get(name)

    def _sign(self, said: str) -> str:
        return hmac.new(self._key, said.encode(), sha256).hexdigest()


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
        secret: a secret shared by all processes that serve the page, since a form can
            be submitted to another process than the one that created it, or after a
            restart.
    """

    def __init__(self, secret: str) -> None:
        self._key = sha256(b"pillarbox forms\0" + secret.encode()).digest()

    def token(self, cookie: str, viewer: str) -> str:
        """Return the token that a form must contain in the browser with this cookie."""
        return hmac.new(self._key, f"{cookie} {viewer}".encode(), sha256).hexdigest()

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
