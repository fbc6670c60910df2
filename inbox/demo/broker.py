"""The broker of the demo."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Broker:
    """Where the relay publishes, and where the consumers listen.

    Attributes:
        url: for the relay, and for the consumers unless they are called over HTTP.
        repeats: whether a message published twice arrives twice; some brokers
            remove duplicates.
        options: only for the consumers' URL: how soon another replica gets the
            messages that a killed one was handling.
        hook: the application that stands for the consumers if they are called over
            HTTP, as `module:name`.
        port: the port on which it listens.
        environment: additional environment variables of the processes.
    """

    url: str = field(repr=False)
    repeats: bool = True
    options: str = ""
    hook: str | None = None
    port: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def source_url(self) -> str:
        """Where the consumers listen."""
        if not self.options:
            return self.url
        return f"{self.url}{'&' if '?' in self.url else '?'}{self.options}"
