"""Find out which messages the code under test has added to a session."""

from typing import Any, Final, TypeVar, overload

from sqlalchemy import event
from sqlalchemy.orm import Session

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.message import Message
from pillarbox.outbox.payload.schema_registry import REGISTRY
from pillarbox.outbox.session import AnySession
from pillarbox.outbox.unsent import uncommitted
from pillarbox.outbox.writer import sync_session

__all__ = ["added"]

E = TypeVar("E")

_COMMITTED: Final = "outbox.testing.messages_committed"


@overload
def added(session: AnySession, of: str | None = None) -> list[Message]: ...


@overload
def added(session: AnySession, of: type[E]) -> list[E]: ...


def added(session: AnySession, of: str | type | None = None) -> list[Any]:
    """Return the messages that were added to `session`, in order.

    They include messages that are waiting for the next flush, that were flushed, and
    that this session committed, but not those that were rolled back, with or without a
    savepoint. There is no I/O, so there is nothing to await, and the role needs no
    privilege to read the outbox.

        def test_an_order_is_announced(session: Session) -> None:
            place_order(session, total=9)
            assert added(session, OrderPlaced) == [OrderPlaced(total=9)]

    Messages are recorded once this module has been imported; the pytest plugin
    imports it. Messages of `insert_statement` are not included.

    Args:
        of: only those of this topic; or the events of this class, which `@event` has
            bound to a topic, decoded and validated.

    Raises:
        ConfigError: the class isn't bound.
        InvalidMessageError: a payload doesn't match the class.
    """
    topic, version = _bound(of) if isinstance(of, type) else (of, None)
    target = sync_session(session)
    messages: list[Message] = [*target.info.get(_COMMITTED, ())]
    for batch in uncommitted(target):
        messages += batch.messages
        # A test that has checked them can close the session without sending them.
        batch.expected = len(batch.messages)
    found = [m for m in messages if topic is None or m.topic == topic]
    if version is None:
        return found
    return [REGISTRY.load(m) for m in found if m.schema_version == version]


def _bound(kind: type) -> tuple[str, int]:
    bound = REGISTRY.topic_of(kind)
    if bound is None:
        raise ConfigError(
            f"{kind.__name__}: isn't bound to a topic; bind it with @event, or pass "
            "the topic"
        )
    return bound


# Before the writer's own listener, which forgets them.
@event.listens_for(Session, "after_commit", insert=True)
def _keep_committed(session: Session) -> None:
    if not session.in_nested_transaction():
        committed = session.info.setdefault(_COMMITTED, [])
        for batch in uncommitted(session):
            if not batch.is_expunged:
                committed += batch.messages
