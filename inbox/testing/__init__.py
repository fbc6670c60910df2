"""The conformance suite of sources: `pillarbox.inbox.testing.source_suite`."""

import pytest

pytest.register_assert_rewrite(
    "pillarbox.outbox.testing.conformance",
    "pillarbox.inbox.testing.source_case",
    "pillarbox.inbox.testing.source_content",
    "pillarbox.inbox.testing.source_outage",
    "pillarbox.inbox.testing.source_settling",
    "pillarbox.inbox.testing.source_sharing",
)
