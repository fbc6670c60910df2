"""The states of a job."""

from enum import StrEnum
from typing import Final


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    WAITING = "waiting"
    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    SKIPPED = "skipped"


OPEN: Final = (JobState.QUEUED, JobState.IN_PROGRESS, JobState.WAITING)
