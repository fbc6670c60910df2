"""Count in the database: what was committed, published, and handled."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text
from typing_extensions import override

from pillarbox.inbox.demo.model import Base

_PROGRESS = text("""
    SELECT (SELECT count(*) FROM orders) AS committed,
           CASE WHEN :relayed THEN (SELECT count(*) FROM outbox.message_status
             WHERE tenant = :tenant AND published_at IS NOT NULL) END AS published,
           (SELECT count(*) FROM handled WHERE consumer = 'billing') AS billing,
           (SELECT count(*) FROM handled WHERE consumer = 'shipping') AS shipping,
           (SELECT count(*) FROM inbox.dead_letter d
             WHERE d.tenant = :tenant AND d.status = 'PENDING' AND NOT EXISTS (
                   SELECT FROM handled h WHERE h.consumer = 'billing'
                      AND h.message_id::text = d.message_id)) AS failed
""")

# Customer and step identify a message: the rows of orders and effects must match one
# to one.
_CHECKS = {
    "committed orders without a message": """
        SELECT count(*) FROM orders o WHERE NOT EXISTS (
            SELECT FROM outbox.message m WHERE m.tenant = :tenant AND m.key = o.customer
               AND convert_from(m.payload, 'UTF8')::jsonb ->> 'step' = o.step::text)""",
    "messages of rolled-back orders": """
        SELECT count(*) - (SELECT count(*) FROM orders)
          FROM outbox.message WHERE tenant = :tenant""",
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
              FROM handled h
             -- A dead letter that a retry handled follows later messages of its key.
             WHERE NOT EXISTS (
                   SELECT FROM inbox.dead_letter d
                    WHERE d.tenant = :tenant AND d.message_id = h.message_id::text
                      AND d.origin = 'consumer:' || h.consumer)) AS h
         WHERE step <= previous""",
    "dead letters that are PENDING": """
        SELECT (SELECT count(*) FROM outbox.dead_letter
                 WHERE tenant = :tenant AND status = 'PENDING')
             + (SELECT count(*) FROM inbox.dead_letter
                 WHERE tenant = :tenant AND status = 'PENDING')""",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the relay, if there is one, and the consumers.

    Attributes:
        published: None if there is no relay.
        failed: dead-lettered by billing, and neither retried nor handled since.
    """

    committed: int
    published: int | None
    billing: int
    shipping: int
    failed: int

    @override
    def __str__(self) -> str:
        """Return one line."""
        line = f"committed {self.committed:>6,}"
        if self.published is not None:
            line += f"   published {self.published:>6,}"
        line += f"   billing {self.billing:>6,}   shipping {self.shipping:>6,}"
        return f"{line}   dead letters {self.failed:>5,}" if self.failed else line

    @property
    def finished(self) -> bool:
        """Whether everything committed was handled by both consumers."""
        return self._is_at_the_end(self.billing)

    @property
    def settled(self) -> bool:
        """Whether the same holds, except for billing's dead letters."""
        return self._is_at_the_end(self.billing + self.failed)

    def _is_at_the_end(self, billing: int) -> bool:
        published = self.committed if self.published is None else self.published
        return self.committed == published == billing == self.shipping


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a transaction in which the demo's tables can be named without a schema."""
    with engine.begin() as connection:
        connection.execute(
            # Compiling a plan for many partitions would take longer than executing it.
            text(
                "SELECT set_config('search_path', :schema, true),"
                " set_config('jit', 'off', true)"
            ),
            {"schema": Base.metadata.schema},
        )
        yield connection


def progress(engine: Engine, tenant: str, *, relayed: bool) -> Progress:
    """Read the progress of the consumers, and of the relay if there is one."""
    with reading(engine) as connection:
        row = connection.execute(
            _PROGRESS, {"tenant": tenant, "relayed": relayed}
        ).one()
    return Progress(*row)


def faults(engine: Engine, tenant: str) -> dict[str, int]:
    """Count every kind of fault; all must be 0."""
    with reading(engine) as connection:
        return {
            name: connection.execute(text(query), {"tenant": tenant}).scalar_one()
            for name, query in _CHECKS.items()
        }


def dead_letters(engine: Engine, tenant: str) -> dict[str, int]:
    """Count billing's dead letters by status."""
    statement = text("""
        SELECT status, count(*) AS letters FROM inbox.dead_letter
         WHERE tenant = :tenant AND origin = 'consumer:billing' GROUP BY 1""")
    with engine.connect() as connection:
        rows = connection.execute(statement, {"tenant": tenant})
        return {row.status: row.letters for row in rows}
