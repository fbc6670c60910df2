"""Put faults into the product, one at a time, and show which of them no test finds.

    python -m tests.mutants                          60 faults, always the same ones
    python -m tests.mutants --seed 2 --sample 20     others
    python -m tests.mutants --compare before.jsonl   those of an earlier run

The faults are drawn evenly from the rooms of the product, the folders below `outbox`,
`inbox`, `relay` and `migrations`, except the demo and the tests for others. Each is put
into a copy of the last commit, whose tests run, the nearest first, until one fails. The
status is 1 if a fault survives that the earlier run found.

mutmut and cosmic-ray change no SQL, run the same tests for each fault, which would take
days here, and don't find a fault again after lines moved.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from tests.mutants.changes import Mutant, mutants
from tests.mutants.tree import ROOT, tree


def main() -> int:
    """Run the tests for each fault, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--sample", type=int, default=60, help="default: 60")
    parser.add_argument("--seconds", type=float, default=240, help="for each fault")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="earlier results")
    default = ROOT / "build" / "mutants.jsonl"
    parser.add_argument("--results", type=Path, metavar="FILE", default=default)
    options = parser.parse_args()
    options.results.parent.mkdir(exist_ok=True)
    results: Counter[str] = Counter()
    lost = 0
    with ExitStack() as stack:
        copy = stack.enter_context(tree(options.seconds))
        file = stack.enter_context(options.results.open("w", buffering=1))
        population = [
            mutant
            for name, source in copy.product.items()
            for mutant in mutants(name, source)
        ]
        if options.compare:
            lines = options.compare.read_text().splitlines()
            before = find_again(map(json.loads, lines), population)
        else:
            before = dict.fromkeys(draw(population, options.sample, options.seed), "")
        for mutant, earlier in before.items():
            outcome = copy.outcome(mutant)
            file.write(json.dumps(mutant._asdict() | outcome._asdict()) + "\n")
            is_lost = earlier == "found" != outcome.result
            lost += is_lost
            results[outcome.result] += 1
            report(
                f"{outcome.result:8} {outcome.seconds:5.0f} s  {mutant}"
                + (f"  by {outcome.test}" if outcome.test else "")
                + ("  (FOUND BEFORE)" if is_lost else "")
            )
    report(", ".join(f"{n} {result}" for result, n in results.most_common()))
    return 1 if lost else 0


def draw(population: Sequence[Mutant], sample: int, seed: int) -> list[Mutant]:
    """Draw from each room in turn a mutant of a random operator."""
    rooms: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for mutant in population:
        room = "/".join(Path(mutant.file).parent.parts[:2])
        rooms[room][mutant.operator].append(mutant)
    random = Random(seed)
    drawn: list[Mutant] = []
    for room in cycle(random.sample(sorted(rooms), len(rooms))):
        if len(drawn) == sample or not any(rooms.values()):
            break
        if operators := rooms[room]:
            operator = random.choice(sorted(operators))
            left = operators[operator]
            drawn.append(left.pop(random.randrange(len(left))))
            if not left:
                del operators[operator]
    return drawn


def find_again(
    before: Iterable[dict[str, Any]], population: Sequence[Mutant]
) -> dict[Mutant, str]:
    """Return the earlier results of the mutants that still exist; report the others."""
    now = {mutant.key: mutant for mutant in population}
    results = {}
    for it in before:
        key = (it["file"], it["text"], it["operator"], it["occurrence"])
        if key in now:
            results[now[key]] = it["result"]
        else:
            report(f"gone     {it['file']}: {it['text']}")
    return results


def report(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
