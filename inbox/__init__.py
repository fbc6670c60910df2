"""Handle each message's effects exactly once.

Read `idempotent` first if you have a consumer of your own: it guards a handler with a
`receipt`, in a `transaction` that the handler can't end. Read `consumer` first if you
use ours: it fetches from a `source` (implementations in `sources/`), dispatches and
settles deliveries (`consuming/`), and runs `handlers/`, long ones as `jobs/`. It runs
messages that may kill the process alone (`poison/`), and stores messages that it gives
up as `dead_letters/`.
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
