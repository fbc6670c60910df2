"""Flask-SQLAlchemy: a view that writes its rows and its messages, and commits.

flask --app examples.frameworks.flask_writer run
"""

import os

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from examples.frameworks.shop import is_duplicate
from pillarbox import Message, add, sqlalchemy_url


class Base(DeclarativeBase):
    """The base class of `db.Model`."""


app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = sqlalchemy_url(
    os.environ["PILLARBOX_DATABASE_URL"]
)
db = SQLAlchemy(app, model_class=Base)


class Order(db.Model):  # type: ignore[misc, name-defined]
    """One row for each order; its reference is checked when the transaction commits."""

    __tablename__ = "purchase"

    id: Mapped[int] = mapped_column(primary_key=True)
    reference: Mapped[str]


@app.errorhandler(IntegrityError)
def refuse(error: IntegrityError) -> tuple[dict[str, str], int]:
    """Answer a second order of one reference."""
    if not is_duplicate(error):
        raise error
    return {"detail": "the order already exists"}, 409


@app.post("/orders")
def place() -> tuple[dict[str, str], int]:
    """Save an order and its message, or neither."""
    body = {"reference": request.json["reference"]}
    db.session.add(Order(**body))
    add(db.session, Message("orders.placed", body, key=body["reference"]))
    db.session.commit()  # without it, both are gone at the end of the request
    return body, 201
