"""In any order of acks, the position never passes an unsettled record."""

from hypothesis import given
from hypothesis import strategies as st

from pillarbox.inbox.sources.kafka.offsets import Offsets


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Offsets with gaps, as in a compacted log, and an order of settling some."""
    offsets = sorted(draw(st.sets(st.integers(0, 200), min_size=1)))
    order = draw(st.permutations(offsets))
    return offsets, order[: draw(st.integers(0, len(order)))]


@given(logs())
def test_the_position_is_the_end_of_the_settled_prefix(
    log: tuple[list[int], list[int]],
) -> None:
    offsets, order = log
    tracked = Offsets()
    for offset in offsets:
        tracked.add(offset)
    settled: set[int] = set()
    for offset in order:
        before = tracked.position
        moved = tracked.settle(offset)
        settled.add(offset)
        beginning = []
        for each in offsets:
            if each not in settled:
                break
            beginning.append(each)
        assert tracked.position == (beginning[-1] + 1 if beginning else None)
        assert moved == (tracked.position != before)


@given(st.lists(st.integers(0, 50), min_size=1))
def test_an_offset_follows_only_if_it_is_the_highest_so_far(offsets: list[int]) -> None:
    tracked = Offsets()
    highest = -1
    for offset in offsets:
        assert tracked.follows(offset) == (offset > highest)
        if offset > highest:
            tracked.add(offset)
            highest = offset
