"""The conformance suite of sources: `inbox.testing.source_suite`."""

import pytest

pytest.register_assert_rewrite(
    "outbox.testing.conformance",
    "inbox.testing.source_case",
    "inbox.testing.source_content",
    "inbox.testing.source_outage",
    "inbox.testing.source_settling",
    "inbox.testing.source_sharing",
)
