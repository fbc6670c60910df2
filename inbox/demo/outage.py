"""Billing fails and is killed; then it recovers, and its dead letters are retried."""

from collections.abc import Callable
from typing import Final

from sqlalchemy.orm import Session

from inbox.demo import tally
from inbox.demo.model import Outage
from inbox.demo.stage import Stage, say, verdict

BILLING: Final = ("--log-level", "debug", "consume", "inbox.demo.consumers:billing")
_BEFORE_KILL: Final = 5
# With fewer orders, the customers whose invoices are refused might place none.
_ENOUGH: Final = 100


def begin(stage: Stage, customers: int, *, of: int) -> None:
    """Make the ledger refuse invoices of the first customers."""
    with Session(stage.engine) as session, session.begin():
        session.add_all(Outage(customer=f"customer-{n:03}") for n in range(customers))
    say(f"  ⚠ the ledger is down for {customers} of {of} customers: billing fails")


def kill_billing(stage: Stage, over: Callable[[], bool]) -> None:
    """Kill billing once it has dead-lettered some messages, and start another.

    Args:
        over: returns whether all orders have been placed.
    """
    stage.watch(lambda p: p.failed >= _BEFORE_KILL or (p.settled and over()))
    stage.processes.kill("billing")
    say("  ✂ SIGKILL billing: what it was handling is rolled back")
    pid = stage.processes.start("billing", "pillarbox", *BILLING)
    say(f"  ↻ started billing (pid {pid})")


def end(stage: Stage) -> None:
    """Let the ledger accept invoices again."""
    with Session(stage.engine) as session, session.begin():
        session.query(Outage).delete()
    say("  ☀ the ledger is back: billing recovers, its dead letters remain")


def repair(stage: Stage) -> None:
    """Show the dead letters and their reasons, and retry them."""
    say()
    say("what failed in the last day, and why:")
    for row in tally.why(stage.engine, stage.tenant):
        said = f"{row.letters:,}, {row.undecided:,} undecided"
        say(f"  {row.origin}  {row.topic}  {row.reason}: {said}")
    consumer = ("--consumer", "inbox.demo.consumers:billing")
    retry = ("retry", "--side", "inbox", "--tenant", stage.tenant, *consumer)
    said = stage.processes.run("pillarbox", "dead-letters", *retry)
    say(f"$ pillarbox dead-letters {' '.join(retry)}")
    say(f"  {said}")
    say()


def report(stage: Stage, committed: int) -> bool:
    """Print the outcome of the dead letters; return whether every count is right."""
    count = tally.dead_letters(stage.engine, stage.tenant)
    given_up, succeeded = sum(count.values()), count.get("SUCCEEDED", 0)
    good = verdict(
        "dead letters of billing", given_up, given_up > 0 or committed < _ENOUGH
    )
    return (
        verdict(
            "dead letters that SUCCEEDED by a retry", succeeded, succeeded == given_up
        )
        and good
    )
