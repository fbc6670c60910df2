"""The application: routes, headers, errors, and the parts of the navigation."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pillarbox.outbox.errors import ConfigError, OutboxError, one_line, traceback_of
from pillarbox.outbox.web import (
    blocked,
    consumers,
    dead_letters,
    jobs,
    messages,
    operations,
    overview,
    partitions,
    scheduled,
    search,
)
from pillarbox.outbox.web.events import LoginRefused, RequestFailed
from pillarbox.outbox.web.frame import Frame, Section, base_of, frame_of, name_in
from pillarbox.outbox.web.login import LOGIN_COOKIE, Identify, TokenLogin
from pillarbox.outbox.web.settings import Settings

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'"
    "; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'"
    "; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With no-referrer, browsers would send forms with the origin "null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def web_app(settings: Settings, identify: Identify) -> Starlette:
    """Create the page, to be served alone or mounted in another application.

    Args:
        settings: what the page may show and do.
        identify: returns who sent a request. With a `TokenLogin`, the page shows its
            own login form; with anything else, the host application handles logins, and
            unknown viewers get status 401.

    The application is for one event loop.

    Raises:
        ConfigError: a URL is invalid, or two databases have one name.
    """
    paths = {settings.database: ""}
    for url in settings.others:
        name = name_in(url)
        if name in map(name_in, paths):
            raise ConfigError(
                f"two databases are called {name}: run another pillarbox web for one"
            )
        paths[url] = f"/of/{name}"
    made = _page(settings, identify, paths)
    for url in settings.others:
        other = replace(settings, database=url, broker=None, codec=None, consumer=None)
        made.routes.insert(0, Mount(paths[url], _page(other, identify, paths)))
    return made


def _page(
    settings: Settings, identify: Identify, paths: Mapping[str, str]
) -> Starlette:
    """Create the pages of one database; each has a path below that of the first."""
    frame = Frame(settings, identify, _SECTIONS, paths)
    actions = {
        "/dead-letters/plan": operations.show_plan,
        "/jobs/cancel": jobs.cancel,
        "/pause": overview.pause,
        "/resume": overview.pause,
        "/operations/ask": operations.ask,
        "/operations/stop": operations.stop,
        "/scheduled/cancel": scheduled.cancel,
        "/scheduled/move": scheduled.move,
    }
    routes: list[BaseRoute] = [
        Route("/", _home),
        Mount("/static", StaticFiles(packages=[("pillarbox.outbox.web", "static")])),
        Route("/login", _login, methods=["GET", "POST"]),
        Route("/logout", _logout, methods=["POST"]),
        *(Route(f"/{it.path}", _seen(partial(_show, it))) for it in _SECTIONS),
        Route("/dead-letters/{side}/{id:uuid}", _seen(dead_letters.show_letter)),
        Route("/message", _seen(messages.show_message)),
        Route("/messages/{id}", _seen(messages.show_message)),
        Route("/search", _seen(search.search)),
        Route("/consumer", _seen(partial(_show, consumers.SECTION))),
        *(Route(path, _seen(it), methods=["POST"]) for path, it in actions.items()),
    ]

    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _refused, OutboxError: _failed},
    )
    app.state.frame = frame
    app.state.runner = operations.Runner(settings, frame.observers.notify)
    app.add_middleware(_SecurityHeaders)
    return app


class _SecurityHeaders:
    """Adds headers to every response that allow only content from the page itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                # A static file has one: browsers would guess how long it stays so.
                cached = "no-cache" if "ETag" in headers else "no-store"
                headers["Cache-Control"] = cached
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _seen(handler: Handler) -> Handler:
    """Wrap a handler so that it serves only known viewers."""

    async def guarded(request: Request) -> Response:
        try:
            await _admit(request)
            return await handler(request)
        except (HTTPException, OutboxError):
            raise
        except Exception as error:  # noqa: BLE001 (the server would log it with values)
            return await _broken(request, error)

    return guarded


async def _admit(request: Request) -> None:
    request.state.viewer = await frame_of(request).viewer(request)
    if request.state.viewer is None:
        raise HTTPException(401)


async def _home(request: Request) -> Response:
    return RedirectResponse(f"{base_of(request)}/{_SECTIONS[0].path}", 303)


async def _login(request: Request) -> Response:
    frame = frame_of(request)
    if not isinstance(frame.identify, TokenLogin):
        raise HTTPException(404)
    problem = None
    if request.method == "POST":
        form = await frame.form(request)
        cookie = frame.identify.accept(form.get("token", ""))
        if cookie is not None:
            origin = request.headers.get("origin", "")
            frame.identify.end(request)
            response = RedirectResponse(f"{base_of(request)}/", 303)
            response.set_cookie(
                LOGIN_COOKIE,
                cookie,
                path=frame.root(request) or "/",
                httponly=True,
                samesite="strict",
                # Behind a proxy, only the browser may know that it speaks HTTPS.
                secure="https" in {request.url.scheme, urlsplit(origin).scheme},
            )
            return response
        client = request.client.host if request.client else "unknown"
        frame.observers.notify(LoginRefused(client=client))
        problem = (
            "This token is unknown. pillarbox web prints one when it starts, unless "
            "--tokens names a file with yours."
        )
    return frame.render(
        request,
        "login.html",
        viewer=None,
        status=403 if problem else 200,
        problem=problem,
    )


async def _logout(request: Request) -> Response:
    frame = frame_of(request)
    await frame.form(request)
    if isinstance(frame.identify, TokenLogin):
        frame.identify.end(request)
    response = RedirectResponse(f"{base_of(request)}/login", 303)
    response.delete_cookie(LOGIN_COOKIE, path=frame.root(request) or "/")
    return response


async def _show(section: Section, request: Request) -> Response:
    frame, viewer = frame_of(request), request.state.viewer
    frame.history.begin()
    values = await frame.database.run(
        lambda connection: section.read(connection, request.query_params), request
    )
    return frame.render(
        request,
        section.template,
        viewer=viewer,
        section=section,
        **{"title": section.title, "may_act": viewer.may_act, **values},
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    frame = frame_of(request)
    if error.status_code == 401 and isinstance(frame.identify, TokenLogin):
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(f"{base_of(request)}/login", 303)
        text = "You are not logged in, or your login has ended. Log in again."
    elif error.status_code == 401:
        text = "Log in to the application that this page is part of."
    elif error.detail == "Not Found":
        text = f"There is no page {request.url.path}: choose one above, or search."
    else:
        text = error.detail
    title = HTTPStatus(error.status_code).phrase
    return await _explain(request, error.status_code, title, text)


async def _failed(request: Request, error: Exception) -> Response:
    status = 400 if isinstance(error, ConfigError) else 503
    return await _explain(request, status, "The request failed", str(error))


async def _broken(request: Request, error: Exception) -> Response:
    reason = one_line(error)
    frame_of(request).observers.notify(
        RequestFailed(
            path=request.url.path, reason=reason, stacktrace=traceback_of(error)
        )
    )
    return await _explain(
        request,
        500,
        "Something went wrong",
        f"{type(error).__name__}: an error in pillarbox. Its log has the stack trace.",
    )


async def _explain(request: Request, status: int, title: str, text: str) -> Response:
    """Return a page with what went wrong, and what to do about it."""
    try:
        viewer = await frame_of(request).viewer(request)
    except Exception:  # noqa: BLE001 (the host's own code; the text matters more)
        viewer = None
    return frame_of(request).render(
        request, "problem.html", viewer=viewer, status=status, title=title, text=text
    )


_SECTIONS: Final[tuple[Section, ...]] = (
    overview.SECTION,
    dead_letters.SECTION,
    messages.SECTION,
    scheduled.SECTION,
    blocked.SECTION,
    jobs.SECTION,
    operations.SECTION,
    partitions.SECTION,
)
