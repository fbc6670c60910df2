"""Apply the effects of each message exactly once.

If you run your own consumer, start with `idempotent`: it guards a handler with a
`receipt`, in a `transaction` that the handler can't end. If you use the consumer of
this package, start with `consumer`: it fetches from a `source` (implemented in
`sources/`), dispatches and settles deliveries (`consuming/`), and runs `handlers/`,
long ones as `jobs/`. Messages that may kill the process run alone (`poison/`). Messages
that can't be handled are stored as `dead_letters/`.
"""

from inbox.consumer import Consumer
from inbox.errors import (
    DeadLetter,
    DuplicateMessageError,
    HandlerTimeoutError,
    InvalidReceiptError,
    JobLostError,
    MessageTooNewError,
    MessageTooOldError,
    RetryLater,
    TransactionControlError,
    TransactionEndedError,
    UnexpectedRollbackError,
)
from inbox.guard import guard
from inbox.idempotent import idempotent, message_id
from inbox.jobs.job import AsyncJob, Job
from inbox.receipt import ForeignId, record_receipt
from inbox.source import Delivery, Source
from outbox.errors import AutocommitError, NotASessionError
from outbox.retry import RetryPolicy

__all__ = [
    "AsyncJob",
    "AutocommitError",
    "Consumer",
    "DeadLetter",
    "Delivery",
    "DuplicateMessageError",
    "ForeignId",
    "HandlerTimeoutError",
    "InvalidReceiptError",
    "Job",
    "JobLostError",
    "MessageTooNewError",
    "MessageTooOldError",
    "NotASessionError",
    "RetryLater",
    "RetryPolicy",
    "Source",
    "TransactionControlError",
    "TransactionEndedError",
    "UnexpectedRollbackError",
    "guard",
    "idempotent",
    "message_id",
    "record_receipt",
]
