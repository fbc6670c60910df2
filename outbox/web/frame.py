"""Code that all sections of the page share: sections, the frame, and the viewer."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, urlencode
from uuid import UUID

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from psycopg.conninfo import conninfo_to_dict
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse

from pillarbox.outbox.administration.check import Finding
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.size import write_size
from pillarbox.outbox.duration import (
    brief_duration,
    exact_duration,
    write_duration,
    write_rate,
)
from pillarbox.outbox.events import Observers
from pillarbox.outbox.observability.logging import logged
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.web.database import Database
from pillarbox.outbox.web.history import History
from pillarbox.outbox.web.login import Identify, TokenLogin, Viewer, is_from_elsewhere
from pillarbox.outbox.web.settings import Settings

_MAX_FORM: Final = 64 * 1024

_LINKS: Final = (
    (r"dead-letters list --side (outbox|inbox)", r"dead-letters?side=\1"),
    (r"(outbox|inbox)\.dead_letter", r"dead-letters?side=\1"),
    (r"pillarbox jobs", "jobs"),
    (r"pillarbox blocked", "blocked"),
    (r"^the consumer (\S+)", r"consumer?name=\1"),
    (r"lanes|relay", "overview#processes"),
    (r"_p\d{8}|pillarbox maintain", "partitions"),
)
"""Where to look, by what a finding says; the first that matches."""

Read: TypeAlias = Callable[[AdministrationConnection, QueryParams], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section in the navigation, which is kept up to date while it is open.

    Attributes:
        path: its path below the page's own; also the name of its template.
        read: returns the values for the template; called in a thread, in a read-only
            transaction.
    """

    path: str
    title: str
    read: Read

    @property
    def template(self) -> str:
        """The file name of its template."""
        return f"{self.path.replace('-', '_')}.html"


class Frame:
    """The state that the handlers of one page share. For one event loop."""

    def __init__(
        self,
        settings: Settings,
        identify: Identify,
        sections: tuple[Section, ...],
        paths: Mapping[str, str],
    ) -> None:
        self.settings = settings
        self.identify = identify
        self.sections = sections
        self.paths = paths
        self.names = {url: name_in(url) for url in paths}
        self.others = {
            url: Database(url, read_only=True)
            for url in paths
            if url != settings.database
        }
        self.database = Database(settings.database, read_only=True)
        self.store = Database(settings.database, read_only=False)
        self.history = History(self.database)
        self.observers = Observers(logged(settings.observers))
        self._templates = Environment(
            loader=PackageLoader("pillarbox.outbox.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(
            age=age,
            moment=moment,
            local=local,
            link=link,
            size=write_size,
            brief=brief_duration,
            duration=exact_duration,
            number="{:,}".format,
            short=short,
            rate=rate,
        )
        shared = self._templates.get_template("table.html").module
        self._templates.globals.update(
            with_query=with_query, table=vars(shared)["table"]
        )

    async def viewer(self, request: HTTPConnection) -> Viewer | None:
        """Return who sent a request; None if the sender may not see the page."""
        found = self.identify(request)
        return await found if inspect.isawaitable(found) else found

    def render(
        self,
        request: Request,
        template: str,
        *,
        viewer: Viewer | None,
        status: int = 200,
        **values: Any,
    ) -> HTMLResponse:
        """Return a whole page."""
        text = self._templates.get_template(template).render(
            base=base_of(request),
            pages=[
                (
                    self.names[url],
                    f"{self.root(request)}{path}/",
                    url == self.database.url,
                )
                for url, path in self.paths.items()
            ],
            sections=self.sections,
            viewer=viewer,
            with_login=isinstance(self.identify, TokenLogin),
            query=request.query_params,
            history=self.history,
            **values,
        )
        return HTMLResponse(text, status)

    def root(self, request: HTTPConnection) -> str:
        """Return the path of the first database's pages, without a trailing slash."""
        return base_of(request).removesuffix(self.paths[self.database.url])

    async def form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form, with those of one name together.

        Raises:
            HTTPException: 403 if another site sent it; 413 if it is too large.
        """
        if is_from_elsewhere(request):
            raise HTTPException(
                403,
                "This form doesn't come from this page. A proxy in between has to pass "
                "on Host.",
            )
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MAX_FORM:
                raise HTTPException(413, "The form is too large.")
        form: dict[str, str] = {}
        text = body.decode(errors="replace")
        for name, value in parse_qsl(text, keep_blank_values=True):
            form[name] = f"{form[name]} {value}" if name in form else value
        return form

    async def acting(
        self, request: Request, right: str = "act"
    ) -> tuple[Viewer, dict[str, str]]:
        """Return who wants to change something, and the fields of the form.

        Args:
            right: the one that it takes, act or pause.

        Raises:
            HTTPException: 403 if that isn't allowed; the message says what allows it.
        """
        viewer = request.state.viewer
        assert isinstance(viewer, Viewer)
        form = await self.form(request)
        if not getattr(viewer, f"may_{right}"):
            raise HTTPException(
                403,
                f"{viewer.name} may not do that. Add the word {right} to the "
                "line of this viewer in the token file.",
            )
        return viewer, form


def frame_of(request: HTTPConnection) -> Frame:
    """Return the frame of the page to which a request was sent."""
    frame = request.app.state.frame
    assert isinstance(frame, Frame)
    return frame


def base_of(request: HTTPConnection) -> str:
    """Return the path at which the page is mounted, without a trailing slash."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def name_in(url: str) -> str:
    """Return the name of the database in a URL.

    Raises:
        ConfigError: it isn't a valid PostgreSQL URL.
    """
    given = conninfo_to_dict(conninfo(str(url)))
    return str(given.get("dbname") or given.get("user") or "default")  # as libpq does


def with_query(query: Mapping[str, str], **changes: object) -> str:
    """Return a query string with some fields changed; empty ones are left out."""
    fields = {**query, **{name: str(value) for name, value in changes.items()}}
    return urlencode({name: value for name, value in fields.items() if value})


def age(at: datetime | None) -> str:
    """Return how long ago a moment was, or how far ahead it is."""
    if at is None:
        return "never"
    passed = datetime.now(UTC) - at
    if passed < timedelta(seconds=-1):
        return f"in {write_duration(-passed)}"
    return f"{write_duration(passed)} ago"


def moment(at: datetime | None) -> str:
    """Return a moment in UTC, to the second."""
    return "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def local(at: datetime | None, exact: bool = False) -> Markup:
    """Return a moment that the browser shows in local time, and in UTC on hover."""
    if at is None:
        return Markup()
    at = at.astimezone(UTC)
    utc = f"{at:%Y-%m-%d %H:%M:%S}" + (f".{at:%f}"[:4] if exact else "")
    tag = Markup('<time datetime="{}" title="{} UTC">{} UTC</time>')
    return tag.format(at.isoformat(timespec="milliseconds"), utc, utc)


def link(finding: Finding) -> str | None:
    """Return where the page shows what a finding is about; None: nowhere."""
    text = f"{finding.finding} {finding.remedy}"
    for pattern, address in _LINKS:
        if found := re.search(pattern, text):
            return found.expand(address)
    return None


def rate(per_second: float | None) -> str:
    """Return a rate per second."""
    return "unknown" if per_second is None else write_rate(per_second)


def short(id: UUID | str) -> str:
    """Return the beginning of an id, which shows its time, and its end."""
    return f"{str(id)[:8]}…{str(id)[-6:]}"
