"""The conformance suite of publishers, for adapters of ours and of others.

    class TestAcmePublisher(PublisherSuite):
        capabilities = Capabilities(deduplicates=True)

        def publisher(self) -> Publisher: ...
        async def received(self, topic: str, count: int) -> Sequence[Message]: ...

It needs pytest and no plug-in: the tests are plain functions with an event loop of
their own. A capability declared absent shows as a skip that says what is missing.
"""

from relay.testing.publisher_answers import PublisherAnswers
from relay.testing.publisher_case import Capabilities
from relay.testing.publisher_content import PublisherContent
from relay.testing.publisher_outage import PublisherOutage

__all__ = ["Capabilities", "PublisherSuite"]


class PublisherSuite(PublisherContent, PublisherAnswers, PublisherOutage):
    """Every test that a publisher has to pass; see `PublisherCase` for the hooks."""
