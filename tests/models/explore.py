"""Visit every state that a model can reach, and count the ways to get to the ends."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from typing_extensions import override

S = TypeVar("S", bound=Hashable)


class BrokenPromiseError(AssertionError):
    """A promise is broken; lists the steps up to then."""


@dataclass(frozen=True, slots=True)
class Explored:
    """How much was tried.

    Attributes:
        interleavings: ways from the start to an end. Steps that lead back to a state
            on the way, like a poll that finds nothing, are left out of them.
    """

    states: int
    steps: int
    interleavings: int

    @override
    def __str__(self) -> str:
        return (
            f"{self.states:,} states, {self.steps:,} steps,"
            f" {self.interleavings:.3g} interleavings"
        )


def explore(start: S, steps: Callable[[S], Iterable[tuple[str, S]]]) -> Explored:
    """Take every step from every state, depth first.

    `steps` gives the steps that are possible in a state, each with the state after it,
    and raises `BrokenPromiseError` if that state, or one of them, breaks a promise.
    """
    ways: dict[S, int | None] = {start: None}
    path: list[tuple[str, S, Iterator[tuple[str, S]]]] = []
    totals: list[int] = []
    taken = 0
    try:
        path.append(("start", start, iter(steps(start))))
        totals.append(0)
        while path:
            _, state, remaining = path[-1]
            for name, after in remaining:
                taken += 1
                # Hash it once, for that takes long. None: on the way here.
                count = len(ways)
                found = ways.setdefault(after, None)
                if len(ways) == count:
                    totals[-1] += found or 0
                    continue
                path.append((name, after, iter(())))
                path[-1] = (name, after, iter(steps(after)))
                totals.append(0)
                break
            else:
                path.pop()
                ways[state] = total = totals.pop() or 1
                if totals:
                    totals[-1] += total
    except BrokenPromiseError as broken:
        happened = "\n".join(f"  {name}" for name, _, _ in path)
        raise BrokenPromiseError(f"{broken}\n{happened}") from None
    return Explored(len(ways), taken, ways[start] or 0)
