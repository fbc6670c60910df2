"""The grants on pillarbox's schemas, as data: who may do what.

Every migration ends with their statements, which `pillarbox migrate --sql` prints, and
`pillarbox doctor` checks the rights of each role against them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of a rule.

    Attributes:
        kind: SCHEMA, TABLE, SEQUENCE, FUNCTION or PROCEDURE.
        names: with their schema; routines with the types of their arguments.
    """

    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What roles may do with objects: one GRANT statement.

    Attributes:
        may: the columns of each privilege; none for the whole object.
        to: names of roles without their prefix.
        why: a comment for the statement.
    """

    may: Mapping[str, tuple[str, ...]]
    on: Objects
    to: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """Routines that PUBLIC may not run; it may run those without a rule."""

    on: Objects


Rule: TypeAlias = Grant | Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One privilege of one role on one object.

    Attributes:
        columns: none for the whole object.
    """

    role: str
    privilege: str
    columns: tuple[str, ...]
    kind: str
    name: str

    @property
    def grant(self) -> str:
        """The statement that grants it, on one line."""
        rule = Grant(
            may={self.privilege: self.columns},
            on=Objects(self.kind, (self.name,)),
            to=(self.role,),
        )
        return _statement(rule)


def rights() -> Iterator[Right]:
    """Yield every right that the rules grant."""
    for rule in (rule for rules in GRANTS.values() for rule in rules):
        if isinstance(rule, Grant):
            for role in rule.to:
                for name in rule.on.names:
                    for privilege, columns in rule.may.items():
                        yield Right(
                            role=role,
                            privilege=privilege,
                            columns=columns,
                            kind=rule.on.kind,
                            name=name,
                        )


def closed_routines() -> dict[str, str]:
    """Return the routines that PUBLIC may not run, each with its kind."""
    return {
        name: rule.on.kind
        for rules in GRANTS.values()
        for rule in rules
        if isinstance(rule, Closed)
        for name in rule.on.names
    }


def grants_of(revision: str) -> str:
    """Return the script that grants the rights on the objects of a migration."""
    rules = GRANTS.get(revision, ())
    return (
        "-- Owner part, repeated at the end of every migration: who may do what.\n"
        f"SET LOCAL ROLE {{owner}};\n{_revoke_all(rules)}{_render(rules)}RESET ROLE;\n"
    )


def _revoke_all(rules: Iterable[Rule]) -> str:
    """Return the statement that withdraws what an earlier version granted."""
    grants = [
        rule for rule in rules if isinstance(rule, Grant) and rule.on.kind == "TABLE"
    ]
    tables = dict.fromkeys(name for grant in grants for name in grant.on.names)
    roles = dict.fromkeys(f"{{{role}}}" for grant in grants for role in grant.to)
    if not tables:
        return ""
    return _wrap(f"REVOKE ALL ON {', '.join(tables)} FROM {', '.join(roles)};")


def _render(rules: Iterable[Rule]) -> str:
    return "".join(
        (_wrap(f"-- {rule.why}", "-- ") if isinstance(rule, Grant) and rule.why else "")
        + _wrap(_statement(rule))
        for rule in rules
    )


def _statement(rule: Rule) -> str:
    kind = "" if rule.on.kind == "TABLE" else f"{rule.on.kind} "
    objects = f"{kind}{', '.join(rule.on.names)}"
    if isinstance(rule, Closed):
        return f"REVOKE ALL ON {objects} FROM PUBLIC;"
    privileges = ", ".join(
        f"{privilege} ({', '.join(columns)})" if columns else privilege
        for privilege, columns in rule.may.items()
    )
    roles = ", ".join(f"{{{role}}}" for role in rule.to)
    return f"GRANT {privileges} ON {objects} TO {roles};"


def _wrap(line: str, indent: str = "    ") -> str:
    return f"{fill(line, 100, subsequent_indent=indent, break_long_words=False)}\n"


def _grant(
    may: Mapping[str, tuple[str, ...]], on: Objects, *to: str, why: str = ""
) -> Grant:
    return Grant(may=may, on=on, to=to, why=why)


def _schema(name: str) -> Objects:
    return Objects("SCHEMA", (name,))


def _tables(*names: str) -> Objects:
    return Objects("TABLE", names)


def _sequence(name: str) -> Objects:
    return Objects("SEQUENCE", (name,))


def _functions(*names: str) -> Objects:
    return Objects("FUNCTION", names)


def _procedure(name: str) -> Objects:
    return Objects("PROCEDURE", (name,))


def _columns(names: str) -> tuple[str, ...]:
    return tuple(names.split())


_USAGE: Final = {"USAGE": ()}
_SELECT: Final = {"SELECT": ()}
_EXECUTE: Final = {"EXECUTE": ()}
_ADD: Final = _functions(
    *(
        f"outbox.add(text, {payload}, text, text, jsonb, text, integer, text,"
        " timestamptz, uuid)"
        for payload in ("bytea", "jsonb", "text")
    )
)
_DEAD_LETTERS: Final = {
    "SELECT": (),
    "INSERT": _columns(
        "origin message_id topic key tenant attempts schema_version content_type"
        " headers payload error_reason error_stacktrace retry_after"
    ),
    "UPDATE": _columns(
        "status retry_count retry_after updated_at error_reason error_stacktrace"
        " discard_reason discarded_by"
    ),
}
_EVIDENCE: Final = (
    "A dead letter is evidence: only the owner may change its payload or its creation"
    " time."
)
_DISCARD: Final = {"UPDATE": _columns("status updated_at discard_reason discarded_by")}
_DEAD_LETTERS_SEEN: Final = {
    "SELECT": _columns(
        "id created_at updated_at status retry_count retry_after origin message_id"
        " topic key tenant attempts schema_version content_type error_reason"
        " discard_reason discarded_by"
    )
}

GRANTS: Final[dict[str, tuple[Rule, ...]]] = {
    "0001": (
        _grant(_USAGE, _schema("outbox"), "monitor"),
        _grant(
            _SELECT,
            _tables("outbox.alembic_version"),
            "monitor",
            why="pillarbox doctor compares the version with its own.",
        ),
    ),
    "0002": (
        Closed(_ADD),
        _grant(
            _USAGE, _schema("outbox"), "application", "relay", "consumer", "maintainer"
        ),
        _grant(_USAGE, _sequence("outbox.message_seq"), "application"),
        _grant(
            {
                "INSERT": _columns(
                    "id lane schema_version available_at topic key tenant"
                    " content_type headers payload"
                )
            },
            _tables("outbox.message"),
            "application",
        ),
        _grant(_EXECUTE, _ADD, "application"),
        _grant(_SELECT, _tables("outbox.message"), "relay"),
        _grant(
            {"SELECT": (), "INSERT": ()},
            _tables("outbox.settlement", "outbox.deferral", "outbox.watermark"),
            "relay",
            why="A message is settled by inserting marks and log entries: nobody may"
            " update these tables.",
        ),
        _grant(_SELECT, _sequence("outbox.message_seq"), "relay", "monitor"),
        _grant(
            {"SELECT": (), "USAGE": ()}, _sequence("outbox.deferral_entry_seq"), "relay"
        ),
        _grant(
            _SELECT,
            _tables(
                "outbox.message_status",
                "outbox.deferred_message",
                "outbox.unsettled_message",
            ),
            "relay",
            "monitor",
        ),
        _grant(
            {
                "SELECT": (),
                "INSERT": _columns("identity"),
                "UPDATE": _columns("identity since"),
            },
            _tables("outbox.broker"),
            "relay",
        ),
        _grant(_SELECT, _tables("outbox.broker"), "monitor"),
        _grant(_DEAD_LETTERS, _tables("outbox.dead_letter"), "relay", why=_EVIDENCE),
        _grant(_SELECT, _tables("outbox.readable_dead_letter"), "relay"),
        _grant(
            {
                "SELECT": _columns(
                    "id created_at seq lane available_at schema_version topic key"
                    " tenant"
                )
            },
            _tables("outbox.message"),
            "monitor",
        ),
        _grant(
            _SELECT,
            _tables("outbox.settlement", "outbox.deferral", "outbox.watermark"),
            "monitor",
        ),
        _grant(_DEAD_LETTERS_SEEN, _tables("outbox.dead_letter"), "monitor"),
        _grant(
            _SELECT,
            _tables(
                "outbox.dead_letter_status",
                "outbox.message_envelope",
                "outbox.message_life",
            ),
            "monitor",
            why="Without payloads; of the headers only those that say what led to a"
            " message.",
        ),
        _grant(_DISCARD, _tables("outbox.dead_letter"), "web"),
    ),
    "0003": (
        Closed(_functions("outbox.replay_caused_by(uuid)")),
        Closed(
            _functions(
                "inbox.unsettled_deliveries"
                "(regclass, timestamptz, timestamptz, integer)"
            )
        ),
        _grant(_EXECUTE, _functions("outbox.replay_caused_by(uuid)"), "consumer"),
        _grant(_USAGE, _schema("inbox"), "consumer", "relay", "maintainer", "monitor"),
        _grant(_EXECUTE, _functions("inbox.moment_of(uuid)"), "consumer", "web"),
        _grant(
            {"SELECT": (), "INSERT": ()},
            _tables("inbox.receipt", "inbox.foreign_receipt"),
            "consumer",
        ),
        _grant(
            {"SELECT": (), "INSERT": (), "DELETE": ()},
            _tables("inbox.subscription"),
            "consumer",
        ),
        _grant(_SELECT, _tables("inbox.delivery"), "consumer"),
        _grant(
            {
                "SELECT": (),
                "INSERT": _columns(
                    "created_at first_seq last_seq lane consumer seqs moments"
                ),
            },
            _tables("inbox.ack"),
            "consumer",
            why="A delivery is settled by inserting marks: nobody may update these"
            " tables.",
        ),
        _grant(
            {
                "SELECT": (),
                "INSERT": _columns(
                    "created_at due_at seq attempts lane cause consumer key"
                ),
            },
            _tables("inbox.redelivery"),
            "consumer",
        ),
        _grant(
            {
                "SELECT": (),
                "INSERT": _columns("created_at above up_to deliveries lane consumer"),
            },
            _tables("inbox.watermark"),
            "consumer",
        ),
        _grant(
            _SELECT,
            _sequence("inbox.delivery_seq"),
            "consumer",
            "monitor",
            why="Which numbers were drawn when.",
        ),
        _grant(
            {"SELECT": (), "USAGE": ()},
            _sequence("inbox.redelivery_entry_seq"),
            "consumer",
        ),
        _grant(_DEAD_LETTERS, _tables("inbox.dead_letter"), "consumer", why=_EVIDENCE),
        _grant(_SELECT, _tables("inbox.readable_dead_letter"), "consumer"),
        _grant(_SELECT, _tables("inbox.subscription"), "relay", "monitor"),
        _grant(
            _USAGE,
            _sequence("inbox.delivery_seq"),
            "relay",
            why="For the postgres publisher.",
        ),
        _grant(
            {
                "INSERT": _columns(
                    "message_id lane schema_version consumer topic key tenant"
                    " content_type headers payload"
                ),
                "SELECT": _columns("message_id created_at seq"),
            },
            _tables("inbox.delivery"),
            "relay",
            why="RETURNING needs SELECT on the columns that it returns.",
        ),
        _grant(
            {
                "SELECT": _columns(
                    "seq created_at message_id lane consumer topic key tenant"
                )
            },
            _tables("inbox.delivery"),
            "monitor",
        ),
        _grant(
            _SELECT,
            _tables("inbox.ack", "inbox.redelivery", "inbox.watermark"),
            "monitor",
        ),
        _grant(
            _SELECT,
            _tables(
                "inbox.delivery_status",
                "inbox.waiting_delivery",
                "inbox.unsettled_delivery",
            ),
            "consumer",
            "monitor",
        ),
        _grant(_SELECT, _tables("inbox.receipt", "inbox.foreign_receipt"), "monitor"),
        _grant(_DEAD_LETTERS_SEEN, _tables("inbox.dead_letter"), "monitor"),
        _grant(_SELECT, _tables("inbox.dead_letter_status"), "monitor"),
        _grant(_DISCARD, _tables("inbox.dead_letter"), "web"),
        _grant(
            {"INSERT": ()},
            _tables("inbox.receipt"),
            "web",
            why="A discard records a receipt.",
        ),
    ),
    "0004": (
        Closed(
            _functions(
                "outbox.set_interval(text, interval, integer)",
                "outbox.adopt_table(text)",
                "outbox.make_partitions(text)",
                "outbox.make_partition(text, timestamptz)",
                "outbox.keep_forgotten(text)",
                "outbox.make_days()",
                "outbox.trim_foreign_receipts_batch()",
                "outbox.detach_expired(text, regclass[], interval)",
                "outbox.upkeep_plan(text)",
                "outbox.finish_detached(text)",
                "outbox.describe_unsettled(text, regclass, timestamptz, timestamptz)",
                "outbox.unsettled_messages(regclass, timestamptz, timestamptz,"
                " integer)",
                "outbox.is_followed(text, timestamptz, timestamptz)",
                "outbox.schedule_detaches()",
                "outbox.trim_cron_log()",
                "outbox.note_failure(text, text, text, text, text, text)",
                "outbox.in_the_way(text, text, text, text, text)",
                "outbox.upkeep_step(text, text, regclass[], interval, integer, integer,"
                " boolean)",
                "outbox.end_upkeep(timestamptz, boolean)",
                "outbox.accept_clock()",
            )
        ),
        Closed(_procedure("outbox.maintain(integer, interval, timestamptz)")),
        _grant(
            _EXECUTE,
            _functions(
                "outbox.make_partitions(text)",
                "outbox.trim_foreign_receipts_batch()",
                "outbox.detach_expired(text, regclass[], interval)",
                "outbox.upkeep_plan(text)",
                "outbox.finish_detached(text)",
                "outbox.note_failure(text, text, text, text, text, text)",
                "outbox.upkeep_step(text, text, regclass[], interval, integer, integer,"
                " boolean)",
                "outbox.end_upkeep(timestamptz, boolean)",
                "outbox.trim_cron_log()",
                "outbox.accept_clock()",
            ),
            "maintainer",
        ),
        _grant(
            _EXECUTE,
            _procedure("outbox.maintain(integer, interval, timestamptz)"),
            "maintainer",
        ),
        _grant(
            _EXECUTE,
            _functions("outbox.upkeep_plan(text)"),
            "monitor",
            "relay",
            "consumer",
        ),
        _grant(_EXECUTE, _functions("outbox.make_days()"), "relay", "consumer"),
        # outbox.partition_health calls it with the rights of the role that reads the
        # view.
        _grant(
            _EXECUTE,
            _functions("outbox.is_followed(text, timestamptz, timestamptz)"),
            "maintainer",
            "monitor",
            "relay",
            "consumer",
        ),
        _grant(
            _SELECT,
            _tables("outbox.partition_policy"),
            "maintainer",
            "monitor",
            "application",
            "relay",
            "consumer",
        ),
        _grant(
            _SELECT,
            _tables(
                "outbox.partition_health", "outbox.upkeep", "outbox.upkeep_failure"
            ),
            "maintainer",
            "monitor",
            "relay",
            "consumer",
        ),
        _grant(
            _SELECT,
            _tables(
                "outbox.retiring_partition",
                "outbox.dropped_partition",
                "outbox.kept_partition",
            ),
            "maintainer",
            "monitor",
        ),
        _grant(
            _USAGE,
            _schema("outbox"),
            "detacher",
            why="The detacher already has this as a member of the owner. Granted to the"
            " role itself, it keeps the role from being dropped while this database"
            " needs it.",
        ),
    ),
    "0005": (
        _grant(
            {"SELECT": (), "INSERT": (), "UPDATE": ()}, _tables("inbox.job"), "consumer"
        ),
        _grant(
            {
                "SELECT": (),
                "INSERT": (),
                "UPDATE": _columns(
                    "starts started_at is_open error_reason error_stacktrace"
                ),
                "DELETE": (),
            },
            _tables("inbox.suspect"),
            "consumer",
        ),
        _grant(_SELECT, _tables("inbox.message_life"), "monitor"),
        _grant(
            {
                "SELECT": _columns(
                    "message_id message_at consumer starts started_at is_open"
                    " error_reason"
                )
            },
            _tables("inbox.suspect"),
            "monitor",
        ),
        _grant(_SELECT, _tables("inbox.job_status"), "consumer", "monitor"),
        _grant(
            {
                "SELECT": _columns(
                    "message_id message_at consumer state lease attempts lease_until"
                    " queued_at started_at cancel_requested_at finished_at topic key"
                    " tenant worker reason"
                )
            },
            _tables("inbox.job"),
            "monitor",
        ),
        _grant(
            {
                "INSERT": _columns(
                    "message_id message_at consumer state cancel_requested_at reason"
                ),
                "UPDATE": _columns(
                    "state cancel_requested_at finished_at reason lease_until"
                ),
            },
            _tables("inbox.job"),
            "web",
            why="To cancel a job.",
        ),
    ),
    # The page's role may read what the monitor may, since it is a member of the
    # monitor.
    "0007": (
        Closed(_functions("outbox.trim_operations()")),
        _grant(_EXECUTE, _functions("outbox.trim_operations()"), "maintainer"),
        _grant(
            {
                "SELECT": (),
                "INSERT": _columns("kind selection reason asked_by expected"),
                "UPDATE": _columns(
                    "state succeeded failed skipped problem finished_at stopped_by"
                ),
            },
            _tables("outbox.operation"),
            "web",
            why="What was asked for, and by whom, can't be changed afterwards.",
        ),
    ),
}
"""The rules of each migration's objects."""
