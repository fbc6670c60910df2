"""Count at the sink: what committed, what was published, what was handled."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text

from examples.shop.model import Base

_PROGRESS = text("""
    SELECT (SELECT count(*) FROM orders) AS committed,
           (SELECT count(*) FROM outbox.message
             WHERE tenant = :tenant AND published_at IS NOT NULL) AS published,
           (SELECT count(*) FROM handled WHERE consumer = 'billing') AS billing,
           (SELECT count(*) FROM handled WHERE consumer = 'shipping') AS shipping
""")

# A message is known by its customer and step: the order's row and the effect's row
# must pair up one to one.
_CHECKS = {
    "committed orders without a message": """
        SELECT count(*) FROM orders o WHERE NOT EXISTS (
            SELECT FROM outbox.message m WHERE m.tenant = :tenant AND m.key = o.customer
               AND convert_from(m.payload, 'UTF8')::jsonb ->> 'step' = o.step::text)""",
    "messages of rolled-back orders": """
        SELECT count(*) - (SELECT count(*) FROM orders)
          FROM outbox.message WHERE tenant = :tenant""",
    "messages not published": """
        SELECT count(*) FROM outbox.message
         WHERE tenant = :tenant AND published_at IS NULL""",
    "messages not handled by billing": """
        SELECT (SELECT count(*) FROM orders) - count(DISTINCT (customer, step))
          FROM handled WHERE consumer = 'billing'""",
    "messages not handled by shipping": """
        SELECT (SELECT count(*) FROM orders) - count(DISTINCT (customer, step))
          FROM handled WHERE consumer = 'shipping'""",
    "effects of orders that do not exist": """
        SELECT count(*) FROM handled h WHERE NOT EXISTS (
            SELECT FROM orders o
             WHERE o.customer = h.customer AND o.step = h.step)""",
    "effects that happened twice": """
        SELECT count(*) - count(DISTINCT (consumer, customer, step))
          FROM handled""",
    "effects out of order within their customer": """
        SELECT count(*) FROM (
            SELECT step, lag(step) OVER (PARTITION BY consumer, customer ORDER BY id)
                   AS previous
              FROM handled) AS h
         WHERE step <= previous""",
    "dead letters": """
        SELECT (SELECT count(*) FROM outbox.dead_letter WHERE tenant = :tenant)
             + (SELECT count(*) FROM inbox.dead_letter WHERE tenant = :tenant)""",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far everybody is."""

    committed: int
    published: int
    billing: int
    shipping: int

    @property
    def finished(self) -> bool:
        """Everything that committed was published and handled by both."""
        return self.committed == self.published == self.billing == self.shipping


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a transaction in which the demo's tables need no schema."""
    with engine.begin() as connection:
        connection.execute(
            text("SELECT set_config('search_path', :schema, true)"),
            {"schema": Base.metadata.schema},
        )
        yield connection


def progress(engine: Engine, tenant: str) -> Progress:
    """Read how far everybody is."""
    with reading(engine) as connection:
        row = connection.execute(_PROGRESS, {"tenant": tenant}).one()
    return Progress(*row)


def faults(engine: Engine, tenant: str) -> dict[str, int]:
    """Count every fault that there could be; all must be 0."""
    with reading(engine) as connection:
        return {
            name: connection.execute(text(query), {"tenant": tenant}).scalar_one()
            for name, query in _CHECKS.items()
        }


def publish_again(engine: Engine, tenant: str, count: int) -> int:
    """Make the relay publish messages a second time, as a replay does."""
    statement = text("""
        UPDATE outbox.message SET published_at = NULL
         WHERE id IN (SELECT id FROM outbox.message
                       WHERE tenant = :tenant AND published_at IS NOT NULL
                       ORDER BY random() LIMIT :count)""")
    with engine.begin() as connection:
        return connection.execute(
            statement, {"tenant": tenant, "count": count}
        ).rowcount
