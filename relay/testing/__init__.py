"""The conformance suite for publishers: `pillarbox.relay.testing.publisher_suite`."""

import pytest

pytest.register_assert_rewrite(
    "pillarbox.outbox.testing.conformance",
    "pillarbox.relay.testing.publisher_answers",
    "pillarbox.relay.testing.publisher_case",
    "pillarbox.relay.testing.publisher_content",
    "pillarbox.relay.testing.publisher_outage",
)
