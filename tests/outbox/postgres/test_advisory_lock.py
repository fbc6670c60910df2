"""Different advisory locks never use the same number."""

from outbox.lane import PRIORITIES, lanes_of
from outbox.postgres.advisory_lock import Lock


def test_lock_numbers_are_unique_and_none_is_a_lane() -> None:
    # An Enum turns equal values into aliases of one member.
    values = [member.value for member in Lock.__members__.values()]
    lanes = [int(lane) for priority in PRIORITIES for lane in lanes_of(priority)]

    assert len({*values, *lanes}) == len(values) + len(lanes)
