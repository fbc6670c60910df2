"""The conformance suite of sources, for adapters of ours and of others.

    class TestAcmeSource(SourceSuite):
        capabilities = Capabilities(delays=False)

        def source(self, consumer: str, topic: str) -> Source: ...
        async def put(self, *messages: Message) -> None: ...

It needs pytest and no plug-in: the tests are plain functions with an event loop of
their own. A capability declared absent shows as a skip that says what is missing.
"""

from inbox.testing.source_case import Capabilities
from inbox.testing.source_content import SourceContent
from inbox.testing.source_outage import SourceOutage
from inbox.testing.source_settling import SourceSettling
from inbox.testing.source_sharing import SourceSharing

__all__ = ["Capabilities", "SourceSuite"]


class SourceSuite(SourceContent, SourceSettling, SourceSharing, SourceOutage):
    """Every test that a source has to pass; see `SourceCase` for the hooks."""
