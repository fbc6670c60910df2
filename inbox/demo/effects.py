"""What billing and shipping do with an order: they write one row as the effect."""

import os
from typing import Final

from inbox.demo.model import Handled
from pillarbox import Message

_EFFECTS: Final = {
    "billing": {"placed": "invoice", "cancelled": "credit note"},
    "shipping": {"placed": "parcel", "cancelled": "return"},
}


TENANT_VARIABLE: Final = "SHOP_TENANT"


def is_ours(message: Message) -> bool:
    """Return whether this run placed the order; a broker can hold older ones."""
    return os.environ.get(TENANT_VARIABLE) in {None, message.tenant}


def effect(consumer: str, message: Message) -> Handled:
    """Build the row of one consumer's effect."""
    order = message.json()
    return Handled(
        consumer=consumer,
        effect=_EFFECTS[consumer][order["kind"]],
        message_id=message.id,
        customer=order["customer"],
        step=order["step"],
    )
