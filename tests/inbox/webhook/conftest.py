"""Events of a webhook's app."""

import pytest

from pillarbox.outbox.testing.events import RecordedEvents


@pytest.fixture
def events() -> RecordedEvents:
    return RecordedEvents()
