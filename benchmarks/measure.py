"""Run variants in turn, and print their figures and the noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

AGAIN = " (again)"
HEADINGS = ("question", "figure", "target", "", "noise")
ALIGNMENTS = (str.ljust, str.rjust, str.ljust, str.ljust, str.rjust)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way of doing the measured work; each call of `run` returns one figure."""

    label: str
    run: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The figures of one variant, in the order in which they were taken."""

    label: str
    figures: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle figure, which one disturbed run doesn't move far."""
        return median(self.figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All series of one comparison; the first variant was measured twice."""

    subject: Series
    again: Series
    others: tuple[Series, ...]

    @property
    def median(self) -> float:
        """The subject's median over both of its series."""
        return median((*self.subject.figures, *self.again.figures))

    @property
    def noise(self) -> float:
        """The ratio between the medians of the two equal series, never below 1."""
        return noise(self.subject, self.again)

    def ratio(self, label: str) -> float:
        """Return the subject's median divided by that of the variant `label`."""
        return self.median / self.other(label).median

    def other(self, label: str) -> Series:
        """Return the series of the variant `label`."""
        for series in self.others:
            if series.label == label:
                return series
        labels = ", ".join(series.label for series in self.others)
        raise LookupError(f"label {label!r} was not measured; measured: {labels}")

    def medians(self, unit: str) -> str:
        """Return one line that names every variant with its median."""
        rows = [(self.subject.label, self.median)]
        rows += [(series.label, series.median) for series in self.others]
        return ", ".join(f"{label} {quantity(value, unit)}" for label, value in rows)


def measure(
    subject: Variant,
    *others: Variant,
    runs: int,
    on_run: Callable[[str, float], None] = lambda label, figure: None,
) -> Measurement:
    """Run subject, others and the subject again in turn, `runs` times each.

    Taking turns spreads a slow spell of the machine over all variants. The subject's
    second series is measured exactly like its first, so the ratio of the two shows how
    much figures differ by chance.
    """
    again = Variant(label=subject.label + AGAIN, run=subject.run)
    series = alternate((subject, *others, again), runs=runs, on_run=on_run)
    return Measurement(
        subject=series[subject.label],
        again=series[again.label],
        others=tuple(series[other.label] for other in others),
    )


def alternate(
    variants: Sequence[Variant],
    *,
    runs: int,
    on_run: Callable[[str, float], None] = lambda label, figure: None,
) -> Mapping[str, Series]:
    """Run each variant `runs` times, A B C A B C, and return the series by label."""
    if runs < 1:
        raise ValueError(f"runs is {runs}; a median needs at least 1 run")
    labels = [variant.label for variant in variants]
    if len(set(labels)) != len(labels):
        raise ValueError(f"labels are {labels}; give each variant a label of its own")
    figures: dict[str, list[float]] = {label: [] for label in labels}
    for _ in range(runs):
        for variant in variants:
            figure = variant.run()
            figures[variant.label].append(figure)
            on_run(variant.label, figure)
    return {
        label: Series(label=label, figures=tuple(taken))
        for label, taken in figures.items()
    }


def noise(one: Series, other: Series) -> float:
    """Return the larger median of two equal series divided by the smaller one."""
    smaller, larger = sorted((one.median, other.median))
    if smaller <= 0:
        raise ValueError(
            f"median of {one.label!r} or {other.label!r} is {smaller}; "
            "figures must be above 0"
        )
    return larger / smaller


class Bound(StrEnum):
    """The side of the target on which a figure must lie."""

    AT_LEAST = "at least"
    AT_MOST = "at most"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a figure must reach."""

    bound: Bound
    value: float

    def met_by(self, figure: float) -> bool:
        """Return whether `figure` is on the right side of the target, or equals it."""
        if self.bound is Bound.AT_LEAST:
            return figure >= self.value
        return figure <= self.value


def at_least(value: float) -> Target:
    """Return a target for figures where more is better."""
    return Target(bound=Bound.AT_LEAST, value=value)


def at_most(value: float) -> Target:
    """Return a target for figures where less is better."""
    return Target(bound=Bound.AT_MOST, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A benchmark's answer to one question.

    An answer without a target is informative: it is neither met nor missed. `detail`
    names the medians from which the figure was computed.
    """

    question: str
    figure: float
    detail: str
    unit: str = "x"
    target: Target | None = None
    noise: float | None = None

    @property
    def missed(self) -> bool:
        """Whether there is a target and the figure misses it."""
        return self.target is not None and not self.target.met_by(self.figure)


def table(answers: Iterable[Answer]) -> str:
    """Return a line for each answer in aligned columns, then the numbered details."""
    numbered = list(enumerate(answers, start=1))
    rows = [HEADINGS, *(_row(number, answer) for number, answer in numbered)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    details = [f"{number:>2}. {answer.detail}" for number, answer in numbered]
    return "\n".join([*lines, "", *details])


def quantity(value: float, unit: str) -> str:
    """Return a number with its unit: three significant digits, no exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()


def _row(number: int, answer: Answer) -> tuple[str, ...]:
    target, verdict = "", ""
    if answer.target is not None:
        bound = quantity(answer.target.value, answer.unit)
        target = f"{answer.target.bound} {bound}"
        verdict = "MISSED" if answer.missed else "met"
    shown_noise = "" if answer.noise is None else f"{answer.noise:.3f}"
    figure = quantity(answer.figure, answer.unit)
    return (f"{number:>2}. {answer.question}", figure, target, verdict, shown_noise)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(row, widths, ALIGNMENTS, strict=True)
    return "  ".join(align(cell, width) for cell, width, align in cells).rstrip()
