"""Ids ascend within a process and differ between processes, whatever the clock."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID

import pytest

from pillarbox import uuid7
from pillarbox.outbox.message_id import is_uuid7, moment_of

MANY = 20_000


@contextmanager
def switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def made_by_threads(make: Callable[[], UUID]) -> list[list[UUID]]:
    made: list[list[UUID]] = [[] for _ in range(4)]

    def fill(ids: list[UUID]) -> None:
        ids.extend(make() for _ in range(MANY))

    threads = [threading.Thread(target=fill, args=(ids,)) for ids in made]
    with switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return made


def test_ids_ascend_within_each_thread_and_contain_their_time() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    made = made_by_threads(uuid7)
    # Many ids within one tick advance its counter, so ids can run slightly ahead.
    after = datetime.now(UTC) + timedelta(milliseconds=4 * MANY / 4096 + 1)
    assert all(before <= moment_of(id) <= after for ids in made for id in ids)
    assert all(is_uuid7(id) for ids in made for id in ids)
    assert all(one < next_ for ids in made for one, next_ in pairwise(ids))
    # Unique even without the random bits.
    assert len({id.int >> 64 for ids in made for id in ids}) == 4 * MANY


def test_ids_stay_at_the_present_when_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = uuid7()
    an_hour_ago = time.time_ns() - 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: an_hour_ago)
    ids = [uuid7() for _ in range(MANY)]
    assert all(one < next_ for one, next_ in pairwise([first, *ids]))
    ahead = moment_of(ids[-1]) - moment_of(first)
    assert ahead <= timedelta(milliseconds=MANY / 4096 + 1)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_makes_different_ids_than_its_parent() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"".join(uuid7().bytes for _ in range(100)))
        os._exit(0)
    ours = {uuid7() for _ in range(100)}
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    theirs = {UUID(bytes=said[at : at + 16]) for at in range(0, len(said), 16)}
    assert len(ours | theirs) == 200
    assert all(is_uuid7(id) for id in theirs)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_another_thread_makes_an_id_makes_its_own() -> None:
    ended = threading.Event()

    def make() -> None:
        while not ended.is_set():
            uuid7()

    threads = [threading.Thread(target=make) for _ in range(4)]
    with switching_often():
        for thread in threads:
            thread.start()
        children = [_fork_child() for _ in range(64)]
        statuses = [os.waitpid(child, 0)[1] for child in children]
        ended.set()
        for thread in threads:
            thread.join()
    assert statuses == [0] * 64


def _fork_child() -> int:
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that hangs
        uuid7()
        os._exit(0)
    return child


def test_a_signals_handler_can_make_an_id_while_its_thread_makes_one() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: uuid7())
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    try:
        ids = [uuid7() for _ in range(MANY)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(set(ids)) == MANY
