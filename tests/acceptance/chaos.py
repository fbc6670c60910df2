"""What can happen to a service: faults in a random order, while a writer writes.

The processes are killed, frozen for longer than their lease, stopped and restarted, the
sessions of the database are terminated, and the database and the broker are restarted.
The order of the faults and their victims follow from a seed; the moments don't.
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Final, TypeAlias

import psycopg

from pillarbox.outbox.testing.postgres import PostgresServer
from tests.acceptance.inspection import Inspection
from tests.acceptance.writer import Writer
from tests.fixtures.processes import RunningProcess
from tests.fixtures.waiting import let_pass, wait_for

OFTEN: Final = ("kill", "freeze", "terminate")
RARE: Final = ("stop", "crash", "restart")
REPLICAS: Final = 3
Running: TypeAlias = tuple[Callable[[], RunningProcess], RunningProcess]
# Faults come while most messages are handled, and not all while one server is away.
_BEHIND: Final = 0.1
_OURS: Final = """
    SELECT pid
      FROM pg_stat_activity
     WHERE datname = current_database() AND application_name ~ '^(pillarbox|counter-)'
     ORDER BY pid
"""
_TALLY: Final = """
    SELECT count(*) AS handled,
           count(DISTINCT (key, number)) AS messages,
           count(*) FILTER (WHERE number < highest_before) AS out_of_order,
           max(pause) AS pause
      FROM (SELECT key, number, at - lag(at) OVER (ORDER BY at) AS pause,
                   max(number) OVER (PARTITION BY key ORDER BY position
                                     ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
                   AS highest_before
              FROM counted) AS c
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How many messages of how many keys, and how many faults of which seed."""

    messages: int
    keys: int
    faults: int
    seed: int


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of the messages.

    Attributes:
        pause: the longest time in which none was handled, in seconds.
    """

    lost: int
    doubled: int
    out_of_order: int
    pause: float


def tally(inspection: Inspection, messages: int) -> Tally:
    """Count what the handlers have committed."""
    ((handled, different, out_of_order, pause),) = inspection.rows(_TALLY)
    return Tally(
        messages - different,
        handled - different,
        out_of_order,
        pause.total_seconds() if pause else 0.0,
    )


class Chaos:
    """Runs three processes of each kind, and lets faults happen to them.

    Args:
        begins: each begins a process of one kind.
        server: the database of writer and handlers.
        others: URLs of other databases with sessions of the processes.
        more: faults of the test's own by name, such as a restart of the broker.
    """

    def __init__(
        self,
        scale: Scale,
        begins: Sequence[Callable[[], RunningProcess]],
        server: PostgresServer,
        writer: Writer,
        *,
        others: Sequence[str] = (),
        more: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        self._scale = scale
        self._random = random.Random(scale.seed)
        self._server = server
        self._writer = writer
        self._databases = (server.url, *others)
        self._more = dict(more or {})
        self._frozen: list[tuple[float, RunningProcess]] = []
        self._began = time.monotonic()
        self._running = [(begin, begin()) for begin in begins for _ in range(REPLICAS)]
        # Restarts are rare, since each takes seconds.
        self._faults = [
            *islice(cycle((*OFTEN, *self._more, *RARE, *OFTEN)), scale.faults)
        ]
        self._random.shuffle(self._faults)
        self.say(str(scale))

    def run(self, handled: Callable[[], int]) -> None:
        """Add the messages while the faults happen, and then let all processes run.

        Args:
            handled: returns how many messages have arrived.
        """
        for done, fault in enumerate(self._faults, 1):
            share = self._scale.messages * done // (len(self._faults) + 1)
            self._writer.add(share - self._writer.added)
            most_behind = self._random.uniform(0, _BEHIND) * self._scale.messages
            wait_for(
                f"most messages arrive before fault {done} ({fault})",
                partial(self._goes_on, handled, share - most_behind),
                seconds=600,
                pause=0.1,
            )
            self._happen(fault)
            let_pass(self._random.uniform(0.1, 1.5))
        self._writer.add(self._scale.messages - self._writer.added)
        for _, process in self._frozen:
            process.thaw()
        self._frozen.clear()

    def replace_all(self, begin: Callable[[], RunningProcess]) -> None:
        """Stop all processes of a kind, as a deploy does, and begin new ones."""
        for each in [it for it in self._running if it[0] is begin]:
            self._replace(RunningProcess.terminate, each)

    def report(self, *facts: object) -> None:
        """Print what happened, as a row of a table."""
        faults = ", ".join(f"{n} {f}" for f, n in sorted(Counter(self._faults).items()))
        self.say(faults, *facts, f"{time.monotonic() - self._began:.0f} s")

    def say(self, *facts: object) -> None:
        sys.stdout.write(f"chaos: {'; '.join(map(str, facts))}\n")

    def _goes_on(self, handled: Callable[[], int], enough: float) -> bool:
        now = time.monotonic()
        for until, process in [*self._frozen]:
            if until <= now:
                process.thaw()
                self._frozen.remove((until, process))
        for _, process in self._running:
            assert process.is_running(), process.log()[-2000:]
        return handled() >= enough

    def _happen(self, fault: str) -> None:
        match fault:
            case "kill":
                self._replace(RunningProcess.kill, self._random.choice(self._awake()))
            case "stop":
                each = self._random.choice(self._awake())
                self._replace(RunningProcess.terminate, each)
            case "freeze":
                _, process = self._random.choice(self._awake())
                process.freeze()
                until = time.monotonic() + self._random.uniform(1, 6)
                self._frozen.append((until, process))
            case "terminate":
                url = self._random.choice(self._databases)
                with psycopg.connect(url, autocommit=True) as connection:
                    sessions = connection.execute(_OURS).fetchall()
                    count = min(self._random.randint(1, 3), len(sessions))
                    for pid in self._random.sample(sessions, count):
                        connection.execute("SELECT pg_terminate_backend(%s)", pid)
            case "crash" | "restart":
                self._server.restart("immediate" if fault == "crash" else "fast")
                self._writer.reconnect()
            case _:
                self._more[fault]()

    def _replace(self, end: Callable[[RunningProcess], None], each: Running) -> None:
        begin, process = each
        self._running.remove(each)
        end(process)
        self._running.append((begin, begin()))

    def _awake(self) -> list[Running]:
        frozen = [process for _, process in self._frozen]
        return [it for it in self._running if it[1] not in frozen]
