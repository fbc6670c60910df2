"""The options of a `memory://` URL: there are none."""

from dataclasses import dataclass
from typing import ClassVar

from pillarbox.outbox.brokers.options import BrokerOptions


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(BrokerOptions):
    """No options: the broker has none."""

    schemes: ClassVar[tuple[str, ...]] = ("memory",)
