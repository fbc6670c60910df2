"""Remedies for errors of the database, chosen by SQLSTATE."""

import re
from typing import Final

from pillarbox.outbox.errors import message_of, sqlstate_of

READ_ONLY: Final = "25006"
_UNKNOWN: Final = (
    "check that the database is running, that this host can reach it, and that it"
    " accepts the URL's credentials and has a connection left"
)
_SCHEMA: Final = (
    "run pillarbox doctor, which names missing objects and rights; pillarbox migrate"
    " creates and grants them"
)
_HIDDEN: Final = (
    "row-level security would hide rows from this role: run pillarbox doctor, which"
    " prints the statements that disable it"
)
_REMEDIES: Final = {
    READ_ONLY: "connect to the primary server, not to a standby, and turn off"
    " default_transaction_read_only of the role, the database and the server",
    "28": "check user and password in the database's URL, and the server's pg_hba.conf",
    "3D": "check the name of the database in the URL; if it is new, create it and run"
    " pillarbox migrate",
    "3F": _SCHEMA,
    "42": _SCHEMA,
    "53100": "free disk space on the database's server",
    "53200": "if it is shared memory, raise max_locks_per_transaction of the server,"
    " because each partition takes locks; otherwise find out what uses its memory",
    "53": "end idle connections, or raise max_connections of the server or the"
    " CONNECTION LIMIT of the role or database",
    "57014": "find out what slows the database, or raise the role's statement_timeout",
    "57P05": "raise idle_session_timeout of the role, database or server, or let the"
    " pool of the engine replace connections sooner (pool_recycle)",
    "57P": "wait until the server has restarted; if that takes long, read its log",
    "08": _UNKNOWN,
    "": "run pillarbox doctor, and read the log of the database's server",
    "pool": "let the pool of the engine hold more connections (pool_size,"
    " max_overflow), or run fewer handlers at once",
}
# Errors while a session starts have no SQLSTATE: libpq passes on only the text. These
# are the words of PostgreSQL, libpq, PgBouncer and SQLAlchemy. A server may use another
# language: `_UNKNOWN` covers these cases, too.
_WORDS: Final = {
    "28": r"authentication failed|no password supplied|no pg_hba\.conf entry|"
    r'not permitted to log in|role ".*" does not exist',
    "3D": r'database ".*" does not exist',
    "42": "permission denied for database",
    "53": "too many c(lients|onnections)|connection slots are reserved|"
    "no more connections allowed",
    "57P": r"the database system is (starting|shutting|not)",
    READ_ONLY: "session is read-only|server is in hot standby mode",
    "pool": "QueuePool limit",
}


def remedy_of(error: BaseException, grant: str | None = None) -> str:
    """Return what to do about an error of a database driver, or what wraps it.

    Args:
        grant: the remedy if a privilege is missing; by default a general one.
    """
    # The error has the SQLSTATE of a missing privilege, and a translated text.
    diagnosis = getattr(error, "diag", None)
    if getattr(diagnosis, "source_function", None) == "check_enable_rls":
        return _HIDDEN
    if grant is not None:
        return grant
    state = _state_of(error)
    return next(_REMEDIES[state[:n]] for n in (5, 4, 3, 2, 0) if state[:n] in _REMEDIES)


def is_final(error: BaseException, *, password_is_fixed: bool) -> bool:
    """Return whether the server will refuse the next session for the same reason.

    It refuses the right to connect, or the role or its password. What a server says in
    another language while a session starts isn't recognized.
    """
    return _state_of(error).startswith(("42", "28")[: 1 + password_is_fixed])


def _state_of(error: BaseException) -> str:
    """Return the SQLSTATE, or the part of it that can be told."""
    if (state := sqlstate_of(error)) is not None:
        return state
    text = message_of(error, with_text=True)
    found = (key for key, words in _WORDS.items() if re.search(words, text))
    return next(found, "08")
