"""Messages that were never sent: their session ended without a flush or a rollback.

A rollback, or an exception that ends the session, discards messages on purpose. A
forgotten commit doesn't, nor does a commit after the messages were expunged, so it is
reported: as the event `MessagesUnsent`, which is logged, and as an
`UnsentMessagesWarning`, which Python shows where it shows a `ResourceWarning`.
"""

import asyncio
import atexit
import logging
import sys
import warnings
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, Final
from weakref import WeakSet, ref

from sqlalchemy import event
from sqlalchemy.orm import Session
from typing_extensions import override

from outbox.errors import shorten
from outbox.events import Event
from outbox.logs.event_record import log_event
from outbox.message import Message
from outbox.session import async_session_of

_MOST_NAMED: Final = 5
_CLOSING: Final = ("close", "reset", "invalidate")
_EXPUNGING: Final = ("expunge", "expunge_all")
_EXPUNGED: Final = "outbox.messages_expunged"
_COMMITTED_WITHOUT: Final = "their session expunged them, and was committed"
# The most frames between a session's `close` and the listener for dropped objects.
_MOST_FRAMES: Final = 12


class UnsentMessagesWarning(ResourceWarning):
    """Messages were added to a session that ended without sending them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesUnsent(Event):
    """Messages were added to a session that was never flushed, and are lost."""

    level = logging.WARNING
    advice = (
        "flush and commit the session that outbox.add was given, or roll it back on "
        "purpose"
    )

    messages: int
    topics: tuple[str, ...]
    reason: str

    @override
    def __str__(self) -> str:
        """Return the text of the warning, with the remedy."""
        topics = [shorten(topic) for topic in self.topics[:_MOST_NAMED]]
        if len(self.topics) > _MOST_NAMED:
            topics.append("…")
        many = "" if self.messages == 1 else "s"
        lost = f"lost {self.messages} message{many} of topic {', '.join(topics)}: "
        if self.reason == _COMMITTED_WITHOUT:
            return f"{lost}{self.reason}; flush the session before you expunge objects"
        return (
            f"{lost}{self.reason} without a commit; commit the session that outbox.add "
            "was given (with Session.begin() as session: …), or roll it back on purpose"
        )


on_unsent: Final[list[Callable[[MessagesUnsent], None]]] = []
"""Listeners that replace the log and the warning, for `outbox.testing`."""


class UnsentMessages:
    """Messages that wait in a session for its flush.

    Attributes:
        is_settled: whether they were sent, or their loss is intended or known.
    """

    def __init__(self) -> None:
        """Start without messages."""
        self.messages: list[Message] = []
        self.is_settled = False
        # An exception that is already being handled isn't what ends the session.
        self.handled = sys.exception()
        self.raised: BaseException | None = None
        unsettled.add(self)

    def __del__(self) -> None:
        """Report messages of a session that was neither closed nor used again."""
        # When the interpreter ends, `report_at_exit` has already reported them.
        if not self.is_settled and self.messages and not sys.is_finalizing():
            self.is_settled = True
            _report(self.messages, "their session was garbage-collected")


unsettled: Final[WeakSet[UnsentMessages]] = WeakSet()
"""The waiting messages of all sessions of the process."""


def watch(session: Session, waiting: UnsentMessages) -> None:
    """Observe how a session is closed if an `AsyncSession` wraps it.

    An `AsyncSession` closes it in another task, where the exception isn't visible.
    """
    outer: Any = async_session_of(session)
    if outer is None or "close" in vars(outer):
        return
    for name in _CLOSING:
        if hasattr(outer, name):
            setattr(outer, name, partial(_close, ref(outer), name))


def _close(outer: ref[Any], name: str) -> Any:
    session = outer()
    if session is None:
        return None
    raised = _failure(sys.exception())
    if raised is not None:
        for dropped in session.sync_session.new:
            if isinstance(dropped, UnsentMessages):
                dropped.raised = raised
    return getattr(type(session), name)(session)


@event.listens_for(Session, "pending_to_transient")
def _note_dropped(session: Session, dropped: object) -> None:
    # A flush, a rollback and an expunge trigger this event, too.
    if not isinstance(dropped, UnsentMessages) or dropped.is_settled:
        return
    dropped.is_settled = True
    raised = dropped.raised or _failure(sys.exception())
    if raised is not None and raised is not dropped.handled:
        return
    if not dropped.messages:
        return
    if _is_inside(_CLOSE, sys._getframe(1)):
        _report(dropped.messages, "their session was closed")
    elif _is_inside(_EXPUNGE, sys._getframe(1)):
        _note_expunged(session, dropped.messages)


def _failure(raised: BaseException | None) -> BaseException | None:
    """Return the exception with which a session ends; None if it ends without one.

    `return` and `break` in a loop over a generator end the generator by GeneratorExit.
    The event loop ends an async one in a task, which it cancels when it ends itself.
    """
    if isinstance(raised, asyncio.CancelledError) and _ends_generator():
        return None
    while isinstance(raised, GeneratorExit) or (
        isinstance(raised, SystemExit) and raised.code in (None, 0)
    ):
        raised = raised.__context__
    return raised


def _ends_generator() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and isinstance(task.get_coro(), _ACLOSE)


async def _nothing() -> AsyncGenerator[None, None]:
    yield


_ACLOSE: Final = type(_nothing().aclose())


def _is_inside(code: set[CodeType], frame: FrameType | None) -> bool:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if frame.f_code in code:
            return True
        frame = frame.f_back
    return False


def _code_of(names: Sequence[str]) -> set[CodeType]:
    return {getattr(Session, n).__code__ for n in names if hasattr(Session, n)}


_CLOSE: Final = _code_of(_CLOSING)
_EXPUNGE: Final = _code_of(_EXPUNGING)


def _note_expunged(session: Session, messages: list[Message]) -> None:
    transaction = session.get_transaction()
    noted, expunged = session.info.get(_EXPUNGED, (None, []))
    if noted is not transaction:
        expunged = []
    session.info[_EXPUNGED] = transaction, [*expunged, *messages]


@event.listens_for(Session, "after_commit")
def _report_expunged(session: Session) -> None:
    # Every commit in the process runs this.
    if _EXPUNGED not in session.info or session.in_nested_transaction():
        return
    transaction, messages = session.info.pop(_EXPUNGED)
    if transaction is session.get_transaction():
        _report(messages, _COMMITTED_WITHOUT)


@event.listens_for(Session, "after_soft_rollback")
def _forget_expunged(session: Session, _: object) -> None:
    session.info.pop(_EXPUNGED, None)


def _report(messages: Sequence[Message], reason: str) -> None:
    topics = tuple(dict.fromkeys(message.topic for message in messages))
    unsent = MessagesUnsent(messages=len(messages), topics=topics, reason=reason)
    if on_unsent:
        for listener in on_unsent:
            listener(unsent)
        return
    log_event(logging.getLogger("pillarbox"), unsent)
    try:
        warnings.warn(str(unsent), UnsentMessagesWarning, stacklevel=2)
    except UnsentMessagesWarning as error:
        # Warnings are errors here, but the session must be closed nevertheless.
        sys.unraisablehook(
            SimpleNamespace(
                exc_type=type(error),
                exc_value=error,
                exc_traceback=error.__traceback__,
                err_msg=None,
                object=None,
            )
        )


@atexit.register
def report_at_exit() -> None:
    """Report messages that still wait in sessions when the process ends."""
    if hasattr(sys, "last_value"):
        return  # an exception ends the process
    for waiting in list(unsettled):
        if not waiting.is_settled and waiting.messages:
            waiting.is_settled = True
            _report(waiting.messages, "the process ended")
