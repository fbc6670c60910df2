"""Adds messages with Django, in blocks of `atomic()` and outside of them.

python -m tests.inbox.frameworks.django_calls
"""

from contextlib import suppress
from copy import deepcopy

import pytest
from django.db import connections, transaction

from examples.frameworks.django_writer import Order, send
from pillarbox import Message
from pillarbox.outbox.errors import AutocommitError

ODD = "%s 'ä\\"


def main(using: str) -> None:
    """Commit two messages of the database's, and no other."""
    Order.objects.using(using).create(reference=f"{using} alone")
    with pytest.raises(AutocommitError, match="connection is in autocommit mode"):
        send(Message("t", b"", key="outside"), using=using)
    with suppress(ZeroDivisionError), transaction.atomic(using):
        send(Message("t", b"", key="rolled back"), using=using)
        raise ZeroDivisionError
    with transaction.atomic(using):
        send(Message("t", b"\x00%s", key="first", headers={"h": ODD}), using=using)
        with suppress(ZeroDivisionError), transaction.atomic(using):
            Order.objects.using(using).create(reference="rolled back")
            send(Message("t", b"", key="to the savepoint"), using=using)
            raise ZeroDivisionError
        Order.objects.using(using).create(reference=f"{using} with messages")
        send(Message("t", b"\x00%s", key=ODD), Message("t", b"", key="3"), using=using)


if __name__ == "__main__":
    bound = deepcopy(connections.databases["default"])
    bound["OPTIONS"]["server_side_binding"] = True
    connections.databases["bound"] = bound
    for alias in ("default", "bound"):
        main(alias)
    connections.close_all()
