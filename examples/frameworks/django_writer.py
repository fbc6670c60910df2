"""Django: a view that writes a model and a message in one `transaction.atomic()`.

uvicorn examples.frameworks.django_writer:app

Of the two drivers that Django can use, it must be psycopg 3. Django's own connection
commits each statement, except in the block: outside of it, `send` raises an error.
"""

import json
import os

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.db import IntegrityError, connections, models, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from psycopg.conninfo import conninfo_to_dict

from pillarbox import Message, add, conninfo

database = conninfo_to_dict(conninfo(os.environ["PILLARBOX_DATABASE_URL"]))
settings.configure(
    ALLOWED_HOSTS=["127.0.0.1"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": database.pop("dbname"),
            "OPTIONS": database,
        }
    },
    ROOT_URLCONF=__name__,
)
django.setup()


class Order(models.Model):
    """One row for each order; its reference is checked when the transaction commits."""

    reference = models.TextField()  # type: ignore[var-annotated]

    class Meta:
        """The other examples use the same table."""

        app_label = "shop"
        db_table = "purchase"


def send(*messages: Message, using: str = "default") -> None:
    """Add messages to the transaction of the `atomic()` block around the call."""
    connection = connections[using]
    connection.ensure_connection()
    add(connection.connection, *messages)


def place(request: HttpRequest) -> HttpResponse:
    """Save an order and its message, or neither."""
    reference = json.loads(request.body)["reference"]
    try:
        with transaction.atomic():
            Order.objects.create(reference=reference)
            send(Message("orders.placed", {"reference": reference}, key=reference))
    except IntegrityError:
        return JsonResponse({"detail": "the order already exists"}, status=409)
    return JsonResponse({"reference": reference}, status=201)


urlpatterns = [path("orders", place)]
app = get_asgi_application()
