"""The conformance suite for publishers: `relay.testing.publisher_suite`."""

import pytest

pytest.register_assert_rewrite(
    "outbox.testing.conformance",
    "relay.testing.publisher_answers",
    "relay.testing.publisher_case",
    "relay.testing.publisher_content",
    "relay.testing.publisher_outage",
)
