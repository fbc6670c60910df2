"""The conformance suite for publishers: Pillarbox's own and yours.

    class TestAcmePublisher(PublisherSuite):
        capabilities = Capabilities(deduplicates=True)

        def publisher(self) -> Publisher: ...
        async def received(self, topic: str, count: int) -> Sequence[Message]: ...

It needs pytest but no plug-ins: the tests are plain functions that run their own event
loop. A test that requires a capability set to `False` is skipped and names it.
"""

from pillarbox.relay.testing.publisher_answers import PublisherAnswers
from pillarbox.relay.testing.publisher_case import Capabilities
from pillarbox.relay.testing.publisher_content import PublisherContent
from pillarbox.relay.testing.publisher_outage import PublisherOutage

__all__ = ["Capabilities", "PublisherSuite"]


class PublisherSuite(PublisherContent, PublisherAnswers, PublisherOutage):
    """Every test that a publisher has to pass; see `PublisherCase` for the hooks."""
