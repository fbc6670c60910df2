"""A process reports its activity once per interval, and that it is idle rarely."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta

from pillarbox.outbox.events import Event
from pillarbox.outbox.observability.activity import IDLE_INTERVALS, Activity
from pillarbox.outbox.testing.events import RecordedEvents

MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Event):
    """Reports how much was done in a period."""

    done: int
    period: timedelta


class Counts:
    """A counter that the test can set."""

    def __init__(self) -> None:
        self.done = 0

    def __call__(self, event: Event) -> None:
        self.done += 1

    @property
    def is_active(self) -> bool:
        return self.done > 0

    def take(self, period: timedelta) -> Event:
        done, self.done = self.done, 0
        return Report(done=done, period=period)


class ActivityWithClock:
    """An activity whose clock the test advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counts = Counts()
        self.reported: list[Event] = []
        self.activity = Activity(
            self.counts, MINUTE, self.reported.append, lambda: self.now
        )

    def after(self, intervals: int, done: int) -> list[Event]:
        for _ in range(intervals):
            self.counts.done += done
            self.now += 60
            self.activity.report()
        reported, self.reported[:] = list(self.reported), []
        return reported


def test_each_interval_with_activity_is_reported_and_an_idle_hour_once() -> None:
    with_clock = ActivityWithClock()
    assert with_clock.after(3, done=2) == [Report(done=2, period=MINUTE)] * 3
    assert with_clock.after(IDLE_INTERVALS - 1, done=0) == []
    hour = Report(done=0, period=timedelta(hours=1))
    assert with_clock.after(1, done=0) == [hour]
    assert with_clock.after(IDLE_INTERVALS, done=0) == [hour]


def test_the_period_of_a_report_begins_at_the_previous_report() -> None:
    with_clock = ActivityWithClock()
    with_clock.after(10, done=0)
    assert with_clock.after(1, done=5) == [Report(done=5, period=11 * MINUTE)]


async def test_activity_before_the_end_is_reported() -> None:
    counts, events = Counts(), RecordedEvents()
    task = asyncio.create_task(Activity(counts, MINUTE, events).run())
    await asyncio.sleep(0)  # noqa: TID251 - lets the task begin
    counts.done = 1
    task.cancel()
    await asyncio.wait([task])
    assert [event.done for event in events.of(Report)] == [1]
