"""The benchmark harness: turns, medians, noise, targets and the printed table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.measure import (
    Answer,
    Series,
    Variant,
    alternate,
    at_least,
    at_most,
    measure,
    noise,
    table,
)


def figures(*values: float) -> Callable[[], float]:
    """Return a variant's body that returns `values` one after the other."""
    left: Iterator[float] = iter(values)
    return lambda: next(left)


def test_variants_take_turns() -> None:
    order: list[str] = []
    variants = [
        Variant(label="a", run=figures(1, 2)),
        Variant(label="b", run=figures(3, 4)),
    ]

    series = alternate(
        variants, runs=2, on_run=lambda label, _figure: order.append(label)
    )

    assert order == ["a", "b", "a", "b"]
    assert series["a"].figures == (1.0, 2.0)
    assert series["b"].figures == (3.0, 4.0)


def test_the_subject_is_measured_twice_and_its_medians_give_the_noise() -> None:
    subject = Variant(label="ours", run=figures(100, 110, 104, 110, 90, 110))
    other = Variant(label="theirs", run=figures(50, 40, 60))

    result = measure(subject, other, runs=3)

    assert result.subject.figures == (100.0, 104.0, 90.0)
    assert result.again.figures == (110.0, 110.0, 110.0)
    assert result.noise == pytest.approx(1.1)
    assert result.median == 107
    assert result.ratio("theirs") == pytest.approx(107 / 50)


def test_noise_does_not_depend_on_which_series_is_faster() -> None:
    slow, fast = Series(label="s", figures=(8,)), Series(label="f", figures=(10,))

    assert noise(slow, fast) == noise(fast, slow) == 1.25


def test_a_figure_equal_to_its_target_meets_it() -> None:
    assert at_least(2.5).met_by(2.5)
    assert not at_least(2.5).met_by(2.49)
    assert at_most(30).met_by(30)
    assert not at_most(30).met_by(30.1)


def test_the_table_shows_question_figure_target_verdict_and_noise() -> None:
    peer = Answer(
        question="relay against peer",
        figure=3.1,
        target=at_least(2.5),
        noise=1.02,
        detail="ours 50,000 /s, peer 16,000 /s",
    )
    memory = Answer(
        question="memory",
        figure=181,
        unit="MiB",
        target=at_most(150),
        noise=1,
        detail="highest of 2 runs",
    )
    payloads = Answer(question="payloads", figure=9000, unit="/s", detail="real ones")

    assert table([peer, memory, payloads]).splitlines() == [
        "question                  figure  target                   noise",
        "----------------------  --------  ---------------  ------  -----",
        " 1. relay against peer    3.10 x  at least 2.50 x  met     1.020",
        " 2. memory               181 MiB  at most 150 MiB  MISSED  1.000",
        " 3. payloads            9,000 /s",
        "",
        " 1. ours 50,000 /s, peer 16,000 /s",
        " 2. highest of 2 runs",
        " 3. real ones",
    ]
