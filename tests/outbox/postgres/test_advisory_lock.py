"""Advisory locks: different locks don't exclude each other."""

from outbox.lane import PRIORITIES, lanes_of
from outbox.postgres.advisory_lock import Lock


def test_lock_numbers_are_unique_and_none_is_a_lane() -> None:
    # Of equal values an Enum would make one member by two names.
    values = [member.value for member in Lock.__members__.values()]
    lanes = [int(lane) for priority in PRIORITIES for lane in lanes_of(priority)]

    assert len({*values, *lanes}) == len(values) + len(lanes)
