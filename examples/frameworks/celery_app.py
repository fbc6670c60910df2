"""Celery: a task that may be delivered twice, like any task with `acks_late`.

celery -A examples.frameworks.celery_app worker
"""

import os
from uuid import UUID

from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from examples.frameworks.billing import invoice
from pillarbox import guard, sqlalchemy_url

app = Celery("billing", broker=os.environ["PILLARBOX_BROKER_URL"])
app.conf.task_acks_late = True  # ack after the commit, not before the work
engine = create_engine(sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"]))
Session = sessionmaker(engine)


@app.task  # type: ignore[untyped-decorator]
def bill(message_id: str, order_id: int) -> None:
    """Bill an order once, however often the task is delivered."""
    id = UUID(message_id)
    with Session.begin() as session, guard(session, id, consumer="billing") as is_new:
        if is_new:
            session.execute(invoice(order_id))
