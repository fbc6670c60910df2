"""Durations and rates, as people write them."""

from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pillarbox.outbox.duration import (
    brief_duration,
    exact_duration,
    read_duration,
    read_rate,
    write_duration,
    write_rate,
)
from pillarbox.outbox.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("15m", 900),
        ("6h", 21600),
        ("7d", 604800),
        ("2w", 1209600),
        ("1h30m", 5400),
        ("1w2d0.5s", 777600.5),
    ],
)
def test_a_duration_is_one_or_more_numbers_with_units(text: str, seconds: int) -> None:
    assert read_duration("--age", text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "6", "h", "-1h", "1y", "30m1h", "1h 30m", "9999999h"]
)
def test_the_error_for_an_invalid_duration_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--age .*write 90s, 15m"):
        read_duration("--age", text)


@given(st.timedeltas(timedelta(0), timedelta(seconds=999_999)))
@example(timedelta(weeks=2))
@example(timedelta(seconds=0.5))
def test_an_exact_duration_round_trips(duration: timedelta) -> None:
    assert read_duration("--age", exact_duration(duration)) == duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (90, "90s"),
        (0.5, "0.5s"),
        (86400 * 14, "14d"),
        (129600, "36h"),
        (523200, "6d1h20m"),
        (-5400, "-90m"),
        (-1.5, "-1.5s"),
    ],
)
def test_an_exact_duration_is_printed_as_a_person_would_type_it(
    seconds: float, text: str
) -> None:
    assert exact_duration(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("text", "per_second"), [("10/s", 10), ("10", 10), ("90/m", 1.5), ("1800/h", 0.5)]
)
def test_a_rate_is_a_number_per_unit_of_time(text: str, per_second: float) -> None:
    assert read_rate("--rate", text) == per_second


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(0, "0/s"), (0.05, "under 0.1/s"), (1.25, "1.2/s"), (1204.4, "1,204/s")],
)
def test_a_rate_is_shown_with_as_many_digits_as_matter(
    per_second: float, text: str
) -> None:
    assert write_rate(per_second) == text


@pytest.mark.parametrize("text", ["", "0/s", "-1/s", "fast", "10/d"])
def test_the_error_for_an_invalid_rate_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--rate .*write 10/s"):
        read_rate("--rate", text)


@pytest.mark.parametrize(
    ("seconds", "written", "said"),
    [
        (-5, "0s", "-5.0s"),
        (-0.5, "0s", "-500ms"),
        (0.0384, "0s", "38ms"),
        (1.25, "1s", "1.2s"),
        (59, "59s", "59.0s"),
        (61, "1m", "1m"),
        (7199, "1h", "1h"),
        (7300, "2h", "2h"),
        (86400 * 3, "3d", "3d"),
    ],
)
def test_a_duration_is_written_in_its_largest_unit_and_a_brief_one_rounded(
    seconds: float, written: str, said: str
) -> None:
    assert write_duration(timedelta(seconds=seconds)) == written
    assert brief_duration(timedelta(seconds=seconds)) == said
