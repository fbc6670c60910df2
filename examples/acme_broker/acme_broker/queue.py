"""The file with the queues, and its errors."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote

from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.url import split, without_password

_FILE = "queue.db"
_PATIENCE = 5.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS message (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    topic TEXT NOT NULL,
    key TEXT,
    headers TEXT NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS message_topic_idx ON message (topic, key, seq);
CREATE TABLE IF NOT EXISTS delivery (
    consumer TEXT NOT NULL,
    seq INTEGER NOT NULL REFERENCES message,
    owner TEXT,                  -- the replica that holds it, until then
    not_before REAL NOT NULL,    -- seconds since 1970
    attempts INTEGER NOT NULL,
    acked INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, seq)
);
"""


class Queue:
    """The file behind a URL."""

    def __init__(self, url: str) -> None:
        parts = split(url)
        if parts.scheme != "acme" or parts.netloc or len(parts.path) < 2:
            raise ConfigError(
                f"broker URL {without_password(url)}: write acme:///path/of/a/directory"
            )
        self._path = Path(unquote(parts.path), _FILE)

    def create(self) -> None:
        """Create the tables if they don't exist."""
        with self._away_when_broken(), closing(self._connect("rwc")) as connection:
            connection.executescript(_SCHEMA)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in an exclusive write transaction."""
        with self._away_when_broken(), closing(self._connect("rw")) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                yield connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self._path.as_uri()}?mode={mode}",
            uri=True,
            timeout=_PATIENCE,
            isolation_level=None,
        )

    @contextmanager
    def _away_when_broken(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise BrokerUnavailableError(f"broker {self._path}: {error}") from error
