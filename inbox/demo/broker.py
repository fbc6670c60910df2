"""The broker of the demo."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Broker:
    """Where the relay publishes, and where the consumers listen.

    Attributes:
        url: for the relay and the consumers.
        repeats: whether a message published twice arrives twice; some brokers
            remove duplicates.
        options: only for the consumers' URL: how soon another replica gets the
            messages that a killed one was handling.
    """

    url: str = field(repr=False)
    repeats: bool = True
    options: str = ""

    @property
    def source_url(self) -> str:
        """Where the consumers listen."""
        if not self.options:
            return self.url
        return f"{self.url}{'&' if '?' in self.url else '?'}{self.options}"
