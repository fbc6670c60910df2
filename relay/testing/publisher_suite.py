"""The conformance suite of publishers, for our adapters and for yours.

    class TestAcmePublisher(PublisherSuite):
        capabilities = Capabilities(deduplicates=True)

        def publisher(self) -> Publisher: ...
        async def received(self, topic: str, count: int) -> Sequence[Message]: ...

It needs pytest without plug-ins: the tests are plain functions that run their own event
loop. A test that needs a capability declared absent is skipped and says which.
"""

from relay.testing.publisher_answers import PublisherAnswers
from relay.testing.publisher_case import Capabilities
from relay.testing.publisher_content import PublisherContent
from relay.testing.publisher_outage import PublisherOutage

__all__ = ["Capabilities", "PublisherSuite"]


class PublisherSuite(PublisherContent, PublisherAnswers, PublisherOutage):
    """Every test that a publisher has to pass; see `PublisherCase` for the hooks."""
