"""The shop's events, as other services see them."""

from decimal import Decimal
from uuid import UUID

from pydantic import BaseModel

from pillarbox import event


@event("orders.placed")
class OrderPlaced(BaseModel):
    order_id: UUID
    customer: str
    amount: Decimal
