"""Compare HEAD with another commit, alternating between the two.

    python -m benchmarks.against 2661586 relay_to_nothing writer guard
    python -m benchmarks.against 95e7517 settling:1000 doorbell.latency

Each tree runs its own benchmarks in its own process, on its own PostgreSQL server. Runs
of the two trees alternate; while one runs, the other is idle. Both trees use the
dependencies of this environment.

Two servers of one commit differ by up to 8 %, in all of their runs. So each round
starts new ones: the figure is the median of the rounds, and the noise how far they lie
apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NoReturn

from benchmarks.conditions import show
from benchmarks.measure import (
    Answer,
    Series,
    Variant,
    alternate,
    at_least,
    measure,
    noise,
    table,
)

ROOT = Path(__file__).parents[1]
SITE = ".against"
LEAST = 0.97
UNITS = {
    "writer": "ms",
    "guard": "ms",
    "upkeep": "ms",
    "doorbell.latency": "ms",
    "takeover": "ms",
}
"""Durations, where less is better; all other figures are rates."""
WRITER_MESSAGES = 1
COSTS = ("settling", "fan_out")
"""Questions about costs; each is followed by the bytes of a payload."""
MESSAGES = {300: 100_000, 1_000: 100_000, 8_000: 20_000}

# Runs in either tree, so it uses only what every commit's benchmarks provide:
# `answers(conditions)` calls `measure(subject, *others, runs=…)`.
DRIVER = """
import sys
from contextlib import closing
from importlib import import_module
import benchmarks.measure
from benchmarks.__main__ import SERVER_SETTINGS, postgres_server
from benchmarks.conditions import Conditions

question, which = sys.argv[1], int(sys.argv[2])
module, _, part = question.partition(".")

class Done(BaseException):
    pass

try:
    from benchmarks.peers.peer import Peer
except ImportError:
    pass
else:
    Peer.python = lambda self: sys.executable  # no peer runs, and none is installed

def serve(subject, *others, runs, on_run=None):
    variant = (subject, *others)[which]
    for _ in sys.stdin:
        print(variant.run(), flush=True)
    raise Done

benchmarks.measure.measure = serve
answers = getattr(import_module(f"benchmarks.{module}"), part or "answers")
with postgres_server(None, settings=SERVER_SETTINGS) as server:
    with closing(Conditions(server=server)) as conditions:
        try:
            list(answers(conditions))
        except Done:
            pass
"""

COSTS_DRIVER = """
import json, sys
from contextlib import closing
from dataclasses import asdict
from importlib import import_module
from benchmarks.__main__ import SERVER_SETTINGS, postgres_server
from benchmarks.conditions import Conditions
from benchmarks.workload import Workload

costs = import_module(f"benchmarks.{sys.argv[1]}").costs
workload = Workload(payload_bytes=int(sys.argv[2]), messages=int(sys.argv[3]))
with postgres_server(None, settings=SERVER_SETTINGS) as server:
    with closing(Conditions(server=server)) as conditions:
        for _ in sys.stdin:
            print(json.dumps(asdict(costs(conditions, workload))), flush=True)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against",
        description="Compare the speed of HEAD with that of another commit.",
    )
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("questions", nargs="+", metavar="question")
    parser.add_argument("--rounds", type=int, default=5, help="with new servers")
    parser.add_argument("--runs", type=int, default=2, help="of a round, in each tree")
    arguments = parser.parse_args(argv)
    answers = []
    with worktree(arguments.commit) as other, worktree("HEAD") as now:
        for question in arguments.questions:
            print(f"{question} …", file=sys.stderr)
            is_costs = question.partition(":")[0] in COSTS
            trees = question, now, other, arguments.commit
            if is_costs:
                answers += compare_costs(*trees, arguments.runs * arguments.rounds)
            else:
                answers.append(compare(*trees, arguments.rounds, arguments.runs))
    print(table(answers))
    return int(any(answer.missed for answer in answers))


def compare(
    question: str, now: Path, other: Path, commit: str, rounds: int, runs: int
) -> Answer:
    unit = UNITS.get(question, "/s")
    which = WRITER_MESSAGES if question == "writer" else 0
    ratios = []
    for _ in range(rounds):
        with ExitStack() as stack:
            head, other_tree = (
                stack.enter_context(running(tree, DRIVER, question, str(which)))
                for tree in (now, other)
            )
            series = alternate(
                [
                    Variant(label="now", run=head.figure),
                    Variant(label=commit, run=other_tree.figure),
                ],
                runs=runs,
                on_run=lambda label, figure: show(label, figure, unit),
            )
        ratio = series["now"].median / series[commit].median
        ratios.append(1 / ratio if unit == "ms" else ratio)
    figures = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    return Answer(
        question=f"{question}: against {commit}",
        figure=median(ratios),
        target=at_least(LEAST),
        noise=max(ratios) / min(ratios),
        detail=f"the speed now divided by the one before, in each round: {figures}",
    )


def compare_costs(
    question: str, now: Path, other: Path, commit: str, runs: int
) -> list[Answer]:
    """Compare what a message costs the server in each tree."""
    module, _, payload = question.partition(":")
    for name in COSTS:
        if not (other / "benchmarks" / f"{name}.py").exists():
            shutil.copy(now / "benchmarks" / f"{name}.py", other / "benchmarks")
    given = (module, payload, str(MESSAGES[int(payload)]))
    taken: dict[str, list[dict[str, float]]] = {}

    def taking(label: str, tree: Tree) -> Callable[[], float]:
        def run() -> float:
            costs = tree.costs()
            taken.setdefault(label, []).append(costs)
            return costs["cpu"]

        return run

    with ExitStack() as stack:
        head, other_tree = (
            stack.enter_context(running(tree, COSTS_DRIVER, *given))
            for tree in (now, other)
        )
        measure(
            Variant(label="now", run=taking("now", head)),
            Variant(label=commit, run=taking(commit, other_tree)),
            runs=runs,
            on_run=lambda label, figure: show(label, figure, "µs"),
        )

    units = {
        "cpu": "µs of CPU",
        "rate": "messages/s",
        "wal": "B of WAL",
        "growth": "x of room, settled to live",
    }
    answers = []
    for what, unit in units.items():
        series = {
            label: Series(
                label=label, figures=tuple(costs[what] for costs in all_costs)
            )
            for label, all_costs in taken.items()
        }
        # HEAD ran twice as often: one half of its runs is the control for the other.
        figures = series["now"].figures
        halves = [Series(label=str(n), figures=figures[n::2]) for n in (0, 1)]
        answers.append(
            Answer(
                question=f"{question} {what}: against {commit}",
                figure=series["now"].median / series[commit].median,
                noise=noise(*halves),
                detail=f"{series['now'].median:,.2f} after {series[commit].median:,.2f}"
                f" {unit}",
            )
        )
    return answers


class Tree:
    """A process that takes one measurement for each line it receives."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def figure(self) -> float:
        return float(self._measure())

    def costs(self) -> dict[str, float]:
        costs: dict[str, float] = json.loads(self._measure())
        return costs

    def _measure(self) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise_gone(self._process)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise_gone(self._process)
        return line


def raise_gone(process: subprocess.Popen[str]) -> NoReturn:
    raise RuntimeError(f"the benchmark ended with status {process.wait()}; see above")


@contextmanager
def running(tree: Path, driver: str, *arguments: str) -> Iterator[Tree]:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", driver, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree / SITE}:{tree}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Tree(process)


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check the commit out into its own directory for the duration of the block."""
    with tempfile.TemporaryDirectory(prefix="pillarbox-against-") as directory:
        path = Path(directory) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(path), commit)
        try:
            install(path)
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def install(tree: Path) -> None:
    """Install the tree into a directory inside it, from which its processes import.

    The editable installation of this environment would give both trees the same schema.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    target = ["--no-build-isolation", "--target", str(tree / SITE), str(tree)]
    subprocess.run([*pip, *target], check=True)


def git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
