"""Write to standard error without waiting for its reader.

A pipe that nobody reads blocks its writer forever. So a thread writes the log, and
whatever ends the process waits for a limited time.
"""

import io
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from select import select
from typing import IO, Final

from typing_extensions import override

from pillarbox.outbox.errors import one_line

PATIENCE: Final = 2.0
"""Maximum number of seconds that the end of a process waits for a reader."""
_MOST: Final = 10_000


def write_error(text: str) -> None:
    """Write to standard error; return after `PATIENCE` even if nobody reads it."""
    thread = threading.Thread(target=_writer(sys.stderr), args=[text], daemon=True)
    thread.start()
    thread.join(PATIENCE)


def _writer(stream: IO[str]) -> Callable[[str], object]:
    """Return a function that writes text at once.

    It bypasses the stream's buffer: the interpreter aborts if a thread still holds the
    buffer's lock when the process ends.
    """
    try:
        raw = open(stream.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115
    except io.UnsupportedOperation:  # an object in memory
        return stream.write

    def write(text: str) -> None:
        rest = memoryview(text.encode(errors="backslashreplace"))
        while rest:
            written = raw.write(rest)
            if written is None:  # the pipe doesn't block, and is full
                select([], [raw], [])
            else:
                rest = rest[written:]

    return write


class StandardErrorHandler(logging.Handler):
    """Logs to standard error from a thread; no caller waits for it.

    While nobody reads, `most` records wait. Further ones are dropped, like those that
    can't be written, and their number is logged once the others are written.
    `logging.shutdown`, which runs when the process ends, flushes it. A forked child,
    which has no threads, writes its records itself.
    """

    def __init__(self, most: int = _MOST) -> None:
        super().__init__()
        self._waiting: queue.Queue[str | threading.Event] = queue.Queue(most)
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._counting = threading.Lock()
        self._process = os.getpid()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, or drop it."""
        is_ours = os.getpid() == self._process
        if self._thread is None and is_ours:
            self._thread = threading.Thread(
                target=self._run, args=[_writer(sys.stderr)], name="log", daemon=True
            )
            self._thread.start()
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001 - the caller's arguments
            text = f"{record.pathname}:{record.lineno}: can't log: {one_line(error)}"
        try:
            if is_ours:
                self._waiting.put_nowait(f"{text}\n")
            else:
                _writer(sys.stderr)(f"{text}\n")
        except (queue.Full, OSError):
            self._drop(1)

    @override
    def flush(self) -> None:
        """Wait until everything is written, or for `PATIENCE`."""
        written = threading.Event()
        if self._thread is not None and os.getpid() == self._process:
            with suppress(queue.Full):
                self._waiting.put(written, timeout=PATIENCE)
                written.wait(PATIENCE)

    def _run(self, write: Callable[[str], object]) -> None:
        while True:
            item = self._waiting.get()
            try:
                if isinstance(item, str):
                    write(item)
                if self._waiting.empty() and (dropped := self._dropped):
                    write(self._report(dropped))
                    self._drop(-dropped)
            except OSError:  # the disk is full, or the reader is gone
                self._drop(isinstance(item, str))
            if isinstance(item, threading.Event):
                item.set()

    def _drop(self, records: int) -> None:
        with self._counting:
            self._dropped += records

    def _report(self, dropped: int) -> str:
        record = logging.LogRecord(
            *("pillarbox", logging.WARNING, __file__, 0),
            *("%d log records were dropped: standard error was full", (dropped,)),
            None,
        )
        return f"{self.format(record)}\n"
