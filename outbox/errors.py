"""What can go wrong, as a tree of exceptions.

Each message names the field, the value and the remedy. What fails for one
message only is a value (`relay.publisher.Nacked`), not an exception.
"""

import re
from typing import Final

# PostgreSQL quotes the row that it refused.
_ROW: Final = re.compile(r"DETAIL:\s+Failing row contains.*?(?=\[SQL: |\Z)", re.DOTALL)


class OutboxError(Exception):
    """Whatever pillarbox raises on purpose."""


class ConfigError(OutboxError, ValueError):
    """A setting, a URL or an argument of a command can't be used."""


class PoolerError(ConfigError):
    """A pooler in transaction mode lies between us and PostgreSQL."""


class InvalidMessageError(OutboxError, ValueError):
    """A message breaks a rule; nothing of it was added."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"message {field} {shorten(value)}: {problem}; {remedy}")


class CodecError(InvalidMessageError):
    """A payload can't be encoded or decoded."""


class NotASessionError(OutboxError, TypeError):
    """The object given is neither a `Session` nor an `AsyncSession`."""


class BrokerUnavailableError(OutboxError):
    """The broker is away: no message is to blame, none is charged an attempt."""


class BrokerTimeoutError(BrokerUnavailableError):
    """A batch got no answer in time: the broker is away, or a smaller one gets one."""


class DatabaseUnavailableError(OutboxError):
    """PostgreSQL can't be reached, or refuses us."""


class MigrationError(OutboxError):
    """The schema can't be made as things are; nothing was changed."""


class UpkeepError(OutboxError):
    """The tables can't be looked after, or looked into, as things are."""


class UnknownImplementationError(ConfigError, LookupError):
    """No publisher or source of that name is installed."""


def shorten(value: object, limit: int = 60) -> str:
    """Quote `value` for an error message, in at most about `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def one_line(error: BaseException) -> str:
    """Say an error in one line: its kind and its message, without values of rows."""
    return f"{type(error).__name__}: {message_of(error)}".strip()


def message_of(error: BaseException) -> str:
    """Give an error's message in one line, without values of rows."""
    hide_values(error)
    return " ".join(_ROW.sub("", str(error)).split())


def hide_values(error: BaseException | None) -> None:
    """Keep SQLAlchemy's errors from quoting parameters, payloads among them."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if hasattr(error, "hide_parameters"):
            error.hide_parameters = True
        error = error.__cause__ or error.__context__
