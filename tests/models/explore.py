"""Visit every state that a model can reach, and count the paths to its end states."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from typing_extensions import override

S = TypeVar("S", bound=Hashable)


class BrokenPromiseError(AssertionError):
    """A promise is broken; the message lists the steps that led there."""


@dataclass(frozen=True, slots=True)
class Explored:
    """How much was explored.

    Attributes:
        interleavings: paths from the start to an end state. Steps back to a state on
            the same path, like a poll that finds nothing, don't count.
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

    `steps` yields the possible steps from a state, each with the state it leads to,
    and raises `BrokenPromiseError` if the state or one of those steps breaks a promise.
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
                # Hash it only once, since that is slow. None: on the current path.
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


def models(small: Mapping[str, object], large: Mapping[str, object]) -> list[Any]:
    """Return models as parameters; each of the large ones may take an hour."""
    marks = (pytest.mark.timeout(3600), pytest.mark.fault, pytest.mark.variant)
    return [
        *(pytest.param(model, id=name) for name, model in small.items()),
        *(pytest.param(model, id=name, marks=marks) for name, model in large.items()),
    ]
