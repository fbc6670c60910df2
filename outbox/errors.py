"""The exceptions that pillarbox raises.

Each message names the field, the value and the remedy. The failure of a single message
is a value (`pillarbox.relay.publisher.Nacked`), not an exception.
"""

import os
import re
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from errno import errorcode
from itertools import islice
from types import FrameType
from typing import Final, NamedTuple, Self

# The part of a message of PostgreSQL or SQLAlchemy that quotes the row. In a text that
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
_OURS: Final = "pillarbox."
_SAFE: Final = frozenset(
    {
        "sqlalchemy.TimeoutError",
        *("psycopg.OperationalError", "psycopg2.OperationalError"),
        *("psycopg.InterfaceError", "psycopg2.InterfaceError"),
        *("psycopg.ProgrammingError", "psycopg.InternalError"),
        "asyncpg.InterfaceError",
    }
)
"""Errors about connections and calls, whose texts hold no values of rows."""
_NETWORK: Final = ("socket", "ssl")  # they have numbers and texts of their own
# Files of Python and of installed packages.
_LIBRARY: Final = re.compile(r"^<|[/\\](site-packages|lib[/\\]python3\.\d+)[/\\]")
_WORD: Final = re.compile(r"\w+")
# This many words in a row are no coincidence, and survive repr(), JSON and a cut.
_QUOTATION: Final = 3
# More isn't stored, and looking for quotations in it would take long.
_MOST_CHARS: Final = 64 * 1024
_MOST_WRAPPERS: Final = 10
_MOST_PARTS: Final = 5
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


class PrerequisiteError(ConfigError):
    """A prerequisite that may still appear is missing, such as the schema."""


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

    @classmethod
    def received(cls, field: str, value: object, problem: str) -> Self:
        """Return the error about a message that another producer published."""
        return cls(field, value, problem, "fix the producer")


class CodecError(InvalidMessageError):
    """A payload can't be encoded or decoded."""


class NotASessionError(OutboxError, TypeError):
    """The object given is neither a `Session` nor an `AsyncSession`."""


class BrokerUnavailableError(OutboxError):
    """The broker is unavailable; no attempt is counted."""


class BrokerTimeoutError(BrokerUnavailableError):
    """A batch got no answer in time.

    The broker is unavailable, or the batch is too large.
    """


class DatabaseUnavailableError(OutboxError):
    """PostgreSQL is unreachable, or rejects the connection."""


class RefusedError(OutboxError):
    """A server refuses the credentials in its URL, and will refuse them again."""


class DatabaseRefusedError(RefusedError, DatabaseUnavailableError):
    """PostgreSQL refuses the role or its password, or the right to connect."""


class BrokerRefusedError(RefusedError, BrokerUnavailableError):
    """The broker refuses the user or the password."""


class CredentialsError(RefusedError, ConfigError):
    """Credentials are missing, or the broker refuses them."""


class MissingPartitionError(OutboxError):
    """The outbox has no partition for now; the transaction was rolled back."""


class NotMigratedError(OutboxError):
    """The database lacks the schema that the migrations create."""


class MigrationError(OutboxError):
    """The schema can't be created or changed in this state."""


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


def check_type(field: str, value: object, kind: type, remedy: str) -> None:
    """Refuse a setting of another type, which would fail later and elsewhere.

    Raises:
        ConfigError: it isn't a `kind`; True and False are no numbers.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(
            f"{field}={shorten(value)}: must be of type {kind.__name__}; {remedy}"
        )


def one_line(error: BaseException, *, with_text: bool = False) -> str:
    """Return an error's type and message in one line; see `message_of`.

    A group is followed by its first parts, which say what failed.
    """
    text = message_of(error, with_text=with_text)
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if not isinstance(error, BaseExceptionGroup):
        return text
    parts = list(leaves_of(error))
    named = [one_line(part, with_text=with_text) for part in parts[:_MOST_PARTS]]
    if len(parts) > _MOST_PARTS:
        named.append(f"and {len(parts) - _MOST_PARTS} more")
    return f"{text}: {'; '.join(named)}"


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error; of a group, what is in it and in the groups in it."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for part in error.exceptions:
        yield from leaves_of(part)


def message_of(error: BaseException, *, with_text: bool = False) -> str:
    """Return in one line what logs, events and spans may say of an error.

    Our own errors keep their text. From an error of a database driver or SQLAlchemy it
    keeps the server's primary message, its SQLSTATE and the constraint. It leaves out
    DETAIL, CONTEXT, the statement and its parameters, which quote the row. Of any other
    error, whose text may hold anything, it says where it was raised, and after which
    one.

    Args:
        with_text: keep the text of any other error, up to where it begins to quote one
            of a database. For a dead letter, which has the payload, too.
    """
    text = _text_of(error, with_text)
    if not with_text and _is_silent(error):
        text += _after(error)
    return " ".join(text.split())


def without_values(text: str, error: BaseException, *, with_text: bool = False) -> str:
    """End a text that came with an error where it begins to quote an error behind it.

    What it quotes is replaced by `message_of` the quoted error.
    """
    text = text[:_MOST_CHARS]
    for behind in _behind(error):
        # In a circle, an error can be behind the one that it wraps.
        if (
            _is_hidden(behind, with_text)
            and _wrapped_by_sqlalchemy(behind) is not error
        ):
            start = _start_of_quotation(text, _str(behind))
            if start is not None:
                text = text[:start] + _text_of(behind, with_text)
    if (row := _ROW.search(text)) is None:
        return text
    text = text[: row.start()].rstrip()
    while text.endswith(_ESCAPED):
        text = text[:-2].rstrip("\\").rstrip()
    return text


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE that the server reported, through any driver or wrapper."""
    found: BaseException | None = error
    for _ in range(_MOST_WRAPPERS):
        for name in ("sqlstate", "pgcode"):  # the latter is psycopg2's
            if isinstance(state := getattr(found, name, None), str):
                return state
        found = getattr(found, "orig", None) or getattr(found, "__cause__", None)
    return None


def traceback_of(error: BaseException, *, with_text: bool = False) -> str:
    """Format an error's traceback with its causes, without values of rows.

    Like `traceback.format_exception`, with each message as `message_of` returns it.
    """
    return "".join(_traceback_lines(error, set(), with_text))


def _traceback_lines(
    error: BaseException, seen: set[int], with_text: bool
) -> Iterator[str]:
    seen.add(id(error))
    cause, context = error.__cause__, error.__context__
    if cause is not None and id(cause) not in seen:
        # A driver's error may be raised from one that quotes the same value.
        is_quoted = _report_of(error) is not None
        yield from _traceback_lines(cause, seen, with_text and not is_quoted)
        yield _CAUSED
    elif (
        cause is None
        and context is not None
        and not error.__suppress_context__
        and id(context) not in seen
    ):
        yield from _traceback_lines(context, seen, with_text)
        yield _WHILE_HANDLING
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_tb(error.__traceback__)
    if not with_text or _is_hidden(error, with_text):
        kind = type(error)
        yield f"{kind.__module__}.{kind.__qualname__}: {_text_of(error, with_text)}\n"
    else:
        text = "".join(traceback.format_exception_only(error))
        yield without_values(text, error, with_text=True).rstrip("\n") + "\n"
    if isinstance(error, BaseExceptionGroup):
        for number, member in enumerate(error.exceptions, 1):
            if id(member) not in seen:
                yield f"  +---------------- {number} ----------------\n"
                text = "".join(_traceback_lines(member, seen, with_text))
                yield textwrap.indent(text, "  | ", lambda _: True)


def _is_hidden(error: BaseException, with_text: bool) -> bool:
    """Return whether an error's own text may hold what must not be shown."""
    return (
        not (with_text or _is_ours(error))
        or _wrapped_by_sqlalchemy(error) is not None
        or _report_of(error) is not None
    )


def _text_of(error: BaseException, with_text: bool) -> str:
    """Return an error's text without such values."""
    if (orig := _wrapped_by_sqlalchemy(error)) is not None:
        kind = type(orig)
        return f"({kind.__module__}.{kind.__qualname__}) {_text_of(orig, with_text)}"
    if (report := _report_of(error)) is not None:
        primary, sqlstate, constraint = report
        if sqlstate is None:
            return primary
        about = [f"SQLSTATE {sqlstate}"]
        if constraint:
            about.append(f"constraint {constraint}")
        return f"{_cut_value(primary, sqlstate)} ({', '.join(about)})"
    if not (with_text or _is_ours(error)):
        return _safe_text_of(error) or _place_of(error)
    return without_values(_str(error), error, with_text=with_text)


def _is_ours(error: BaseException) -> bool:
    return any(kind.__module__.startswith(_OURS) for kind in type(error).__mro__)


def _is_silent(error: BaseException) -> bool:
    """Return whether only its type and place may be known."""
    return not (_is_hidden(error, True) or _is_ours(error) or _safe_text_of(error))


def _safe_text_of(error: BaseException) -> str | None:
    """Return the text of an error that can't be about a value of the application."""
    if isinstance(error, OSError):  # without the names of files
        if type(error).__module__ in _NETWORK:
            return error.strerror
        # An application can raise it with any text beside the number.
        number = error.errno or 0
        return os.strerror(number) if number in errorcode else None
    kinds = type(error).__mro__
    names = (f"{it.__module__.partition('.')[0]}.{it.__name__}" for it in kinds)
    return None if _SAFE.isdisjoint(names) else _str(error)


def _place_of(error: BaseException) -> str:
    """Return where an error was raised: in the application's code, if it passed any."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    return f"raised in {place_in(frames[::-1])}" if frames else ""


def own_frame(frames: Sequence[tuple[FrameType, int]]) -> tuple[FrameType, int]:
    """Return the first frame of the application, or of all if there is none."""
    own = (it for it in frames if not _LIBRARY.search(it[0].f_code.co_filename))
    return next(own, frames[0])


def place_in(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Name the innermost function of the application; they begin with the innermost."""
    frame, line = own_frame(frames)
    name = re.split(r"[/\\]", frame.f_code.co_filename)[-1]
    return f"{frame.f_code.co_qualname} ({name}, line {line})"


def _after(error: BaseException) -> str:
    """Name the error behind a silent one: the first that has a text, or the next."""
    behind = [*islice(_behind(error), _MOST_WRAPPERS)]
    if isinstance(error, BaseExceptionGroup) or not behind:
        return ""
    named = next((it for it in behind if not _is_silent(it)), behind[0])
    return f", after {type(named).__name__}: {_text_of(named, with_text=False)}"


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
            _str(error.args[0]) if error.args else "", sqlstate, error.constraint_name
        )
    # SQLAlchemy's translation of an asyncpg error.
    return None if error.__cause__ is None else _report_of(error.__cause__)


def _wrapped_by_sqlalchemy(error: BaseException) -> BaseException | None:
    orig = getattr(error, "orig", None)
    is_wrapper = isinstance(orig, BaseException) and hasattr(error, "statement")
    return orig if is_wrapper else None


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that an error's text may quote: causes, contexts and members."""
    seen = {id(error)}
    found = [error]
    while found:
        known = found.pop(0)
        if isinstance(known, OutboxError):
            continue  # it quotes no values, though it can name the same message
        members = known.exceptions if isinstance(known, BaseExceptionGroup) else ()
        for behind in (known.__cause__, known.__context__, *members):
            if behind is not None and id(behind) not in seen:
                seen.add(id(behind))
                found.append(behind)
                yield behind


def _start_of_quotation(text: str, quoted: str) -> int | None:
    """Return where a text begins to repeat words of another one; None if nowhere."""
    words = _WORD.findall(quoted[:_MOST_CHARS])
    length = min(_QUOTATION, len(words))
    if length == 0:
        return None
    runs = {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}
    found = list(_WORD.finditer(text))
    for i, first in enumerate(found):
        if tuple(word[0] for word in found[i : i + length]) in runs:
            return first.start()
    return None


def _cut_value(primary: str, sqlstate: str) -> str:
    """Remove the value from the message of a data exception."""
    if not sqlstate.startswith(_DATA_EXCEPTION):
        return primary
    return _ARGUMENT.sub(r"\1", _QUOTED.sub('"…"', primary))


def _str(value: object) -> str:
    """Return an error's text, even if its own code fails."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - the error's own code
        return _UNSAYABLE
