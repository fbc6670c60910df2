"""The log's handler never waits for a reader, and loses nothing unreported."""

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from select import select

import pytest

from pillarbox.outbox.observability.standard_error import StandardErrorHandler
from tests.fixtures.waiting import wait_for

SIZE = 65536


@contextmanager
def pipe() -> Iterator[int]:
    """Make standard error a pipe; yield its end for the reader."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        yield read
        os.close(read)


def log(handler: logging.Handler, text: str) -> None:
    handler.handle(logging.LogRecord("x", logging.INFO, "f.py", 1, text, None, None))


def read_until(pipe: int, text: str) -> str:
    found = b""
    while not found.endswith(text.encode()):
        found += os.read(pipe, SIZE)
    return found.decode()


def test_records_are_written_in_order_to_a_pipe_or_a_stream_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pipe() as reader:
        handler = StandardErrorHandler()
        for n in range(100):
            log(handler, f"record {n}")
        handler.flush()
        expected = "".join(f"record {n}\n" for n in range(100))
        os.set_blocking(reader, False)
        assert os.read(reader, SIZE).decode() == expected, "after a flush"
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = StandardErrorHandler()
    log(handler, "captured")
    handler.flush()
    assert stream.getvalue() == "captured\n"


def test_records_that_find_no_room_are_dropped_and_counted() -> None:
    with pipe() as reader:
        handler = StandardErrorHandler(most=10)
        long = "x" * SIZE
        for _ in range(50):  # the thread holds at most one, and the pipe less than two
            log(handler, long)
        found = read_until(reader, "standard error was full\n")
        written = found.count(long)
        assert f"{50 - written} log records were dropped" in found
        assert 10 <= written <= 12
        log(handler, "the next one")
        assert read_until(reader, "the next one\n") == "the next one\n"


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    with pipe() as reader:
        os.set_blocking(sys.stderr.fileno(), False)
        handler = StandardErrorHandler()
        log(handler, "x" * 2 * SIZE)
        wait_for("the pipe to be full", lambda: not select([], [sys.stderr], [], 0)[1])
        log(handler, "the next one")
        found = read_until(reader, "the next one\n")
        assert found == "x" * 2 * SIZE + "\nthe next one\n"


def test_a_full_disk_costs_only_the_records_that_it_has_no_room_for() -> None:
    with pipe() as reader:
        roomy = os.dup(sys.stderr.fileno())
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, sys.stderr.fileno())
        handler = StandardErrorHandler()
        log(handler, "lost")
        handler.flush()
        os.dup2(roomy, sys.stderr.fileno())
        os.close(full)
        os.close(roomy)
        log(handler, "the next one")
        found = read_until(reader, "standard error was full\n")
        assert found.startswith("the next one\n")
        assert "1 log records were dropped" in found


def test_a_forked_child_writes_its_records() -> None:
    script = """
import logging, os
from pillarbox.outbox.observability.standard_error import StandardErrorHandler
logging.basicConfig(format="%(message)s", handlers=[StandardErrorHandler()])
logging.error("the parent")
logging.getLogger().handlers[0].flush()
if os.fork() == 0:
    logging.error("the child")
    os._exit(0)
os.wait()
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stderr == "the parent\nthe child\n"


def test_a_record_that_cannot_be_formatted_is_reported() -> None:
    with pipe() as reader:
        handler = StandardErrorHandler()
        record = logging.LogRecord(
            "x", logging.INFO, "f.py", 7, "%d", ("secret",), None
        )
        handler.handle(record)
        found = read_until(reader, "\n")
        assert found.startswith("f.py:7: can't log: TypeError")
        assert "secret" not in found
