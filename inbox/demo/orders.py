"""The shop: places orders in business transactions, some of which roll back."""

import random
import threading
from dataclasses import dataclass
from itertools import repeat

from sqlalchemy.orm import Session, sessionmaker

import pillarbox
from inbox.demo.model import Order
from pillarbox import Message

# One topic for everything that happens to a customer's orders: most brokers have one
# queue per topic, and keep no order between topics.
TOPIC = "demo.orders"
CONSUMERS = ("billing", "shipping")


class PaymentDeclinedError(Exception):
    """The bank declined after the order was written: everything rolls back."""


@dataclass(slots=True)
class Tally:
    """What the shop did, as counted by the shop itself."""

    committed: int = 0
    rolled_back: int = 0


class Shop:
    """Customers who place orders, and sometimes cancel them. `run` blocks its thread.

    Args:
        sessions: of the application's own database.
        tenant: marks this run's messages.
        customers: how many there are; the key of a message is its customer.
    """

    def __init__(
        self, sessions: sessionmaker[Session], *, tenant: str, customers: int
    ) -> None:
        self._sessions = sessions
        self._tenant = tenant
        self._steps = dict.fromkeys((f"customer-{n:03}" for n in range(customers)), 0)
        self._random = random.Random(7)
        self.tally = Tally()

    @property
    def customers(self) -> list[str]:
        """The customers who place orders."""
        return list(self._steps)

    def run(
        self, orders: int | None, stop: threading.Event, pause: float = 0.0
    ) -> None:
        """Place this many orders, unless `stop` is set before.

        Args:
            orders: None for no limit.
            pause: seconds between two orders.
        """
        for _ in repeat(None) if orders is None else repeat(None, orders):
            if stop.wait(pause):
                return
            customer = self._random.choice(self.customers)
            kind = "cancelled" if self._random.random() < 0.1 else "placed"
            try:
                self._order(customer, kind, declined=self._random.random() < 0.125)
            except PaymentDeclinedError:
                self.tally.rolled_back += 1
            else:
                self._steps[customer] += 1
                self.tally.committed += 1

    def _order(self, customer: str, kind: str, *, declined: bool) -> None:
        step = self._steps[customer] + 1
        amount = self._random.randint(5, 500)
        with self._sessions.begin() as session:
            session.add(Order(customer=customer, step=step, kind=kind, amount=amount))
            pillarbox.add(
                session,
                Message(
                    TOPIC,
                    {
                        "kind": kind,
                        "customer": customer,
                        "step": step,
                        "amount": amount,
                    },
                    key=customer,
                    tenant=self._tenant,
                ),
            )
            if declined:
                raise PaymentDeclinedError
