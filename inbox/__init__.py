"""The consuming side of pillarbox: a handler's effects happen exactly once.

`idempotent` guards a handler in any consumer, by `receipt`. `consumer` is a process
of its own: for each of its queues it fetches (`receive`) from a `source`
(implementations in `sources/`), keeps what it has in order (`flight`), gives each its
turn (`turns`), runs its handler in a transaction (`handle`) that the handler can't end
(`transaction`) and settles it (`settle`).
Handlers may be long (`leased`, `job`), of many messages (`batch`) and of one schema
version (`versions`).
"""

from inbox.consumer import Consumer
from inbox.errors import (
    DeadLetter,
    InvalidReceiptError,
    MessageTooNewError,
    MessageTooOldError,
    RetryLater,
    TransactionControlError,
    TransactionEndedError,
    UnexpectedRollbackError,
)
from inbox.guard import guard
from inbox.idempotent import idempotent, message_id
from inbox.receipt import ForeignId, record_receipt
from inbox.source import Delivery, Source

__all__ = [
    "Consumer",
    "DeadLetter",
    "Delivery",
    "ForeignId",
    "InvalidReceiptError",
    "MessageTooNewError",
    "MessageTooOldError",
    "RetryLater",
    "Source",
    "TransactionControlError",
    "TransactionEndedError",
    "UnexpectedRollbackError",
    "guard",
    "idempotent",
    "message_id",
    "record_receipt",
]
