"""The conformance suite of sources, for built-in adapters and for your own.

    class TestAcmeSource(SourceSuite):
        capabilities = Capabilities(stalls=False)

        def source(self, consumer: str, topic: str) -> Source: ...
        async def put(self, *messages: Message) -> None: ...

It needs pytest without plug-ins: the tests are plain functions that run their own event
loop. A test that needs an absent capability is skipped and names it.
"""

from pillarbox.inbox.testing.source_case import Capabilities
from pillarbox.inbox.testing.source_content import SourceContent
from pillarbox.inbox.testing.source_outage import SourceOutage
from pillarbox.inbox.testing.source_settling import SourceSettling
from pillarbox.inbox.testing.source_sharing import SourceSharing

__all__ = ["Capabilities", "SourceSuite"]


class SourceSuite(SourceContent, SourceSettling, SourceSharing, SourceOutage):
    """All tests that a source must pass; see `SourceCase` for the hooks."""
