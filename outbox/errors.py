"""The exceptions that pillarbox raises.

Each message names the field, the value and the remedy. The failure of a single message
is a value (`relay.publisher.Nacked`), not an exception.
"""

import json
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

# The part of PostgreSQL's or SQLAlchemy's message that quotes the row. In a text that
# repr() or JSON wrote, a line begins after a backslash and a letter.
_ROW: Final = re.compile(
    r"(?:\b|(?<=\\[nrt]))(?:DETAIL:\s|CONTEXT:\s|LINE \d+: )|"
    r"\[SQL: |\[parameters: |Original exception was: "
)
_ESCAPED: Final = (r"\n", r"\r", r"\t")
_DATA_EXCEPTION: Final = "22"
# The message of a data exception quotes the value, in its language's quotation marks.
_QUOTED: Final = re.compile(r"[\"«»„“‹].*[\"»«“”›]", re.DOTALL)
# asyncpg quotes the value as Python does, and its cause may quote it, too.
_ARGUMENT: Final = re.compile(
    r"(invalid input for query argument \$\d+[^:]*): .*", re.DOTALL
)
# How a message is written inside the text of another error. repr() escapes its single
# quotes only if the whole text has quotes of both kinds.
_QUOTINGS: Final[tuple[Callable[[str], str], ...]] = (
    lambda text: repr(text)[1:-1],
    lambda text: repr(f'"{text}')[2:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)
_MOST_WRAPPERS: Final = 10
_UNSAYABLE: Final = "<exception str() failed>"  # traceback writes the same
_CAUSED: Final = (
    "\nThe above exception was the direct cause of the following exception:\n\n"
)
_WHILE_HANDLING: Final = (
    "\nDuring handling of the above exception, another exception occurred:\n\n"
)


class OutboxError(Exception):
    """The base class of all errors that pillarbox raises."""


class ConfigError(OutboxError, ValueError):
    """A setting, a URL or a command's argument is invalid."""


class PoolerError(ConfigError):
    """A pooler in transaction mode is between pillarbox and PostgreSQL."""


class AutocommitError(ConfigError):
    """A connection commits each statement separately, so nothing can be rolled back."""


class InvalidMessageError(OutboxError, ValueError):
    """A message breaks a rule; nothing was added."""

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
    """The broker is unavailable: this costs no message an attempt."""


class BrokerTimeoutError(BrokerUnavailableError):
    """A batch got no answer in time.

    The broker is unavailable, or the batch is too large.
    """


class DatabaseUnavailableError(OutboxError):
    """PostgreSQL is unreachable, or rejects the connection."""


class MigrationError(OutboxError):
    """The schema can't be created or changed in this state; nothing was changed."""


class UpkeepError(OutboxError):
    """The upkeep can't run, or can't read the tables, in this state."""


class UnknownImplementationError(ConfigError, LookupError):
    """No publisher or source of that name is installed."""


def shorten(value: object, limit: int = 60) -> str:
    """Quote `value` for an error message, in at most about `limit` characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the value's own code
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def one_line(error: BaseException) -> str:
    """Return an error's type and message in one line, without values of rows."""
    return f"{type(error).__name__}: {message_of(error)}".strip()


def message_of(error: BaseException) -> str:
    """Return an error's message in one line, without values of rows.

    From an error of a database driver or SQLAlchemy it keeps the server's primary
    message, its SQLSTATE and the constraint. It leaves out DETAIL, CONTEXT, the
    statement and its parameters, which quote the row.
    """
    return " ".join(_without_rows(error).split())


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE that the server reported, through any driver or wrapper."""
    found: BaseException | None = error
    for _ in range(_MOST_WRAPPERS):
        for name in ("sqlstate", "pgcode"):  # the latter is psycopg2's
            if isinstance(state := getattr(found, name, None), str):
                return state
        found = getattr(found, "orig", None) or getattr(found, "__cause__", None)
    return None


def traceback_of(error: BaseException) -> str:
    """Format an error's traceback with its causes, without values of rows.

    Like `traceback.format_exception`, with each message as `message_of` returns it.
    """
    return "".join(_traceback_lines(error, set()))


def _traceback_lines(
    error: BaseException, seen: set[int], *, is_silent: bool = False
) -> Iterator[str]:
    seen.add(id(error))
    cause, context = error.__cause__, error.__context__
    if cause is not None and id(cause) not in seen:
        yield from _traceback_lines(
            cause, seen, is_silent=is_silent or _is_of_argument(error)
        )
        yield _CAUSED
    elif (
        cause is None
        and context is not None
        and not error.__suppress_context__
        and id(context) not in seen
    ):
        yield from _traceback_lines(context, seen, is_silent=is_silent)
        yield _WHILE_HANDLING
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_tb(error.__traceback__)
    if is_silent:
        yield f"{type(error).__name__}\n"
    elif _is_of_database(error):
        kind = type(error)
        yield f"{kind.__module__}.{kind.__qualname__}: {message_of(error)}\n"
    else:
        said = "".join(traceback.format_exception_only(error))
        yield _cut_rows(said, error).rstrip("\n") + "\n"
    if isinstance(error, BaseExceptionGroup):
        for number, member in enumerate(error.exceptions, 1):
            if id(member) not in seen:
                yield f"  +---------------- {number} ----------------\n"
                text = "".join(_traceback_lines(member, seen))
                yield textwrap.indent(text, "  | ", lambda _: True)


def _without_rows(error: BaseException) -> str:
    if (orig := _wrapped_by_sqlalchemy(error)) is not None:
        kind = type(orig)
        return f"({kind.__module__}.{kind.__qualname__}) {_without_rows(orig)}"
    if (report := _report_of(error)) is None:
        return _cut_rows(_said(error), error)
    primary, sqlstate, constraint = report
    if sqlstate is None:
        return primary
    primary = _cut_value(primary, sqlstate)
    about = [f"SQLSTATE {sqlstate}"]
    if constraint:
        about.append(f"constraint {constraint}")
    return f"{primary} ({', '.join(about)})"


class _Report(NamedTuple):
    primary: str
    sqlstate: str | None
    constraint: str | None


def _report_of(error: BaseException) -> _Report | None:
    """Return what the server reported, through any driver; None if it didn't."""
    diagnosis = getattr(error, "diag", None)  # psycopg and psycopg2
    if primary := getattr(diagnosis, "message_primary", None):
        return _Report(
            primary,
            getattr(diagnosis, "sqlstate", None),
            getattr(diagnosis, "constraint_name", None),
        )
    if not isinstance(sqlstate := getattr(error, "sqlstate", None), str):
        return None
    if hasattr(error, "constraint_name"):  # asyncpg
        return _Report(
            _said(error.args[0]) if error.args else "", sqlstate, error.constraint_name
        )
    # SQLAlchemy's translation of an asyncpg error.
    return None if error.__cause__ is None else _report_of(error.__cause__)


def _is_of_argument(error: BaseException) -> bool:
    """Return whether asyncpg couldn't encode an argument of a statement."""
    report = _report_of(error)
    return report is not None and _ARGUMENT.match(report.primary) is not None


def _is_of_database(error: BaseException) -> bool:
    return _wrapped_by_sqlalchemy(error) is not None or _report_of(error) is not None


def _wrapped_by_sqlalchemy(error: BaseException) -> BaseException | None:
    orig = getattr(error, "orig", None)
    is_wrapper = isinstance(orig, BaseException) and hasattr(error, "statement")
    return orig if is_wrapper else None


def _cut_rows(text: str, error: BaseException) -> str:
    """Remove the rows that its causes and contexts quote from an error's text."""
    for quoted in _behind(error):
        if _is_of_database(quoted):
            for said, cut in _forms_of(quoted):
                text = text.replace(said, cut)
    if (row := _ROW.search(text)) is None:
        return text
    text = text[: row.start()].rstrip()
    while text.endswith(_ESCAPED):
        text = text[:-2].rstrip("\\").rstrip()
    return text


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that an error's text may quote: causes, contexts and members."""
    seen = {id(error)}
    found = [error]
    while found:
        known = found.pop(0)
        members = known.exceptions if isinstance(known, BaseExceptionGroup) else ()
        for behind in (known.__cause__, known.__context__, *members):
            if behind is not None and id(behind) not in seen:
                seen.add(id(behind))
                found.append(behind)
                yield behind


def _forms_of(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield what an error says, as others may quote it, each with its cut form."""
    pairs = [(_said(error), _without_rows(error))]
    report = _report_of(error)
    if report is not None and report.sqlstate is not None:
        pairs.append((report.primary, _cut_value(report.primary, report.sqlstate)))
    for _ in range(2):
        pairs += [(f(said), f(cut)) for said, cut in pairs for f in _QUOTINGS]
    yielded = set()
    for said, cut in pairs:
        if said and said != cut and said not in yielded:
            yielded.add(said)
            yield said, cut


def _cut_value(primary: str, sqlstate: str) -> str:
    """Remove the value from the message of a data exception."""
    if not sqlstate.startswith(_DATA_EXCEPTION):
        return primary
    return _ARGUMENT.sub(r"\1", _QUOTED.sub('"…"', primary))


def _said(value: object) -> str:
    """Return an error's text, even if its own code fails."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - the error's own code
        return _UNSAYABLE
