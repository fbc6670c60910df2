"""The shop: places orders in business transactions, some of which roll back."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Final

from sqlalchemy.orm import Session, sessionmaker

import pillarbox
from pillarbox import Message
from pillarbox.inbox.demo.model import Order

# One topic for everything that happens to a customer's orders: most brokers have one
# queue per topic, and keep no order between topics.
TOPIC = "demo.orders"
CONSUMERS = ("billing", "shipping")
TENANT_VARIABLE: Final = "SHOP_TENANT"


def is_ours(message: Message) -> bool:
    """Return whether this run placed the order; a broker can hold older ones."""
    return os.environ.get(TENANT_VARIABLE) in {None, message.tenant}


class PaymentDeclinedError(Exception):
    """The bank declined after the order was written: everything rolls back."""


class Shop:
    """Customers who place orders, and sometimes cancel them.

    Args:
        sessions: of the application's own database.
        tenant: marks this run's messages.
        customers: how many there are; the key of a message is its customer.

    Attributes:
        committed, rolled_back: the orders, as counted by the shop itself.
    """

    def __init__(
        self, sessions: sessionmaker[Session], *, tenant: str, customers: int
    ) -> None:
        self._sessions = sessions
        self._tenant = tenant
        self._steps = dict.fromkeys((f"customer-{n:03}" for n in range(customers)), 0)
        self._random = random.Random(7)
        self.committed = 0
        self.rolled_back = 0

    @property
    def customers(self) -> list[str]:
        """The customers who place orders."""
        return list(self._steps)

    @contextmanager
    def ordering(
        self, orders: int | None, pause: float = 0.0
    ) -> Iterator[threading.Thread]:
        """Place orders in a thread during the block, which waits for the last one.

        Args:
            orders: None for no limit.
            pause: seconds between two orders.
        """
        stop = threading.Event()
        thread = threading.Thread(target=self.run, args=(orders, stop, pause))
        thread.start()
        try:
            yield thread
            thread.join()
        finally:
            stop.set()
            thread.join()

    def run(
        self, orders: int | None, stop: threading.Event, pause: float = 0.0
    ) -> None:
        """Place this many orders, unless `stop` is set before."""
        for _ in repeat(None) if orders is None else repeat(None, orders):
            if stop.wait(pause):
                return
            customer = self._random.choice(self.customers)
            kind = "cancelled" if self._random.random() < 0.1 else "placed"
            try:
                self._order(customer, kind, declined=self._random.random() < 0.125)
            except PaymentDeclinedError:
                self.rolled_back += 1
            else:
                self._steps[customer] += 1
                self.committed += 1

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
