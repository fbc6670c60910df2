"""A model of a log, its writers and its readers, over a simulated PostgreSQL.

Positions, floors and the progress of a lane are the real code of `outbox/log`. The
model covers what transactions see (ids, snapshots, the sequence, savepoints, prepared
transactions, commits in any order), one lane in up to two days, the table of positions
with its unique number, the log of exceptions, and a reader that claims, publishes and
settles. Readers are killed between any two statements, and two can believe to own the
lane. The server can crash and lose the end of its WAL, like a standby that is promoted,
while a reader has a batch in flight and goes on, and a dump can be restored in another
cluster.

Every state is checked: a committed row that its position covers has an open entry or
was published, and a row with an open entry is covered. No row is published before one
of its key that its writer could see. In every end state, all committed rows have been
published. Unless a reader was killed or lost the lane, none was published twice.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from pillarbox.outbox.log.hidden import Floors
from pillarbox.outbox.log.position import Position, Snapshot
from pillarbox.outbox.log.progress import Day, Progress, Stored, fence_of
from tests.models.explore import BrokenPromiseError

DAYS: Final = tuple(
    Day(datetime(2026, 1, day, tzinfo=UTC), datetime(2026, 1, day + 1, tzinfo=UTC))
    for day in (1, 2, 3)
)
NEW, OPEN, PREPARED, ENDED = "new", "open", "prepared", "ended"
# The last entry of a row in the log of exceptions; a row without one has none.
REFUSED, BLOCKED, SCHEDULED = "refused", "blocked", "scheduled"
DUE, DUE_LATER, REPLAYED = "due", "scheduled and due", "replayed"
WAITS_FOR_KEY: Final = {REFUSED, BLOCKED, DUE}


class Row(NamedTuple):
    """A row of the table. The ids count all rows that were ever written."""

    id: int
    seq: int
    xid: int
    key: str
    """`-`: none."""
    day: int
    writer: int
    after: frozenset[int]
    """The rows of its key that its writer could see, or wrote itself."""
    is_scheduled: bool = False
    is_committed: bool = False
    is_other: bool = False
    """Whether its topic is not one of the reader's."""
    is_added: bool = False
    """Whether its topic is added to the reader's later."""


class Writer(NamedTuple):
    """A session that executes a script."""

    script: str
    status: str = NEW
    xid: int = 0
    subxid: int = 0
    cached: int = 0
    """The next number of the sequence that it has drawn already; 0: none."""


class Database(NamedTuple):
    """What the server stores."""

    writers: tuple[Writer, ...]
    next_xid: int = 1
    ended: int = 0
    """The highest transaction id that has ended."""
    next_seq: int = 1
    rows: tuple[Row, ...] = ()
    start: Position | None = Position()
    """The position of a day for which none is stored; None: no reader is created."""
    topic: Position | None = None
    """Where the added topic begins; None: claims can't see it."""
    adding: Position | None = None
    """What `topic` will be, once the transaction commits that changes it."""
    has_begun: bool = False
    is_dropped: bool = False
    """Whether the reader was dropped; it gets `topic` since it returned."""
    returned: Position | None = None
    """Where `topic` began at first."""
    stored: tuple[Stored, ...] = ()
    """The last stored row of each day."""
    numbers: frozenset[tuple[Day, int]] = frozenset()
    entries: tuple[tuple[int, str], ...] = ()
    """The open entries by the ids of their rows."""
    logged: frozenset[int] = frozenset()
    """Rows that got an entry when no position covered them."""
    base: int | None = -1
    """None: a dump was restored, and nothing has been migrated."""
    dropped: frozenset[Day] = frozenset()


class Batch(NamedTuple):
    """The outcomes of a claim."""

    publish: tuple[int, ...]
    held: tuple[int, ...]
    scheduled: tuple[int, ...]
    days: frozenset[Day]
    after: Progress
    """The progress once the batch is settled."""
    refused: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    """Rows for which there was no answer."""
    is_published: bool = False


class Owner(NamedTuple):
    """A process that owns the lane, or believes so."""

    progress: Progress
    floors: Floors = Floors()
    has_lease: bool = True
    entries: tuple[tuple[int, str], ...] = ()
    """What a process without the lease remembers of the log."""
    batch: Batch | None = None
    unwritten: Database | None = None
    """The second of two transactions, if a settlement takes two."""
    has_session: bool = True
    """Whether the server has not crashed since the session began in which it read."""
    acked: frozenset[int] = frozenset()
    """Rows that the broker took, but whose settlement a crash has prevented."""
    topic: Position | None = None
    """The added topic, as it remembers it, if it does."""


class Budget(NamedTuple):
    """How often each event can happen."""

    refusals: int = 0
    kills: int = 0
    losses: int = 0
    """How often an owner loses its lease without noticing."""
    crashes: int = 0
    restores: int = 0
    outages: int = 0
    partial: int = 0
    """How often the broker answers for the first rows of a batch only."""
    replays: int = 0
    by_hand: int = 0
    """How often the table's owner inserts a row with a number of its choice."""
    resets: int = 0
    midnights: int = 0
    steps_back: int = 0
    """How often the clock steps back over midnight."""
    drops: int = 0
    """How many days are dropped, once they have passed and all is done."""
    returns: int = 0
    """How often the reader is dropped and returns."""
    opened: int = 0
    """How often a consumer holds a delivery for so long that it gets an entry."""
    ahead: int = 0
    """How many rows a consumer finds before its claims reach them."""


class State(NamedTuple):
    """Everything that decides which steps are possible next."""

    database: Database
    budget: Budget
    today: int = 0
    owners: tuple[Owner | None, Owner | None] = (None, None)
    published: frozenset[int] = frozenset()
    may_repeat: bool = False
    replayed: frozenset[int] = frozenset()
    lost: int = 0
    """The highest id of the rows that were lost in a crash."""
    exempt: frozenset[int] = frozenset()
    """Rows from before the reader was created."""
    flushed: Database | None = None
    """What survives a crash."""
    kept: frozenset[int] = frozenset()
    """What survives of the published rows, if the broker is in the same server."""


_NOTHING_GOES_WRONG: Final = Budget()


@dataclass(frozen=True)
class LogModel:
    """The possible steps.

    Args:
        scripts: what each writer does: `x` gets a transaction id, another letter writes
            a row with that key, `-` one without a key, `S` one that is scheduled, `O`
            one of a topic that the reader doesn't get, `N` one of key k of a topic that
            is added to the reader's at any moment; `(` writes one of key k in a
            savepoint, `)` rolls it back; `p` prepares the transaction, `.` commits, `?`
            commits or rolls back, `|` begins again.
        most: the maximum number of rows in a claim.
        days: how many days there are.
        fence: what keeps a former owner from settling: the unique `number`, its
            `session`, which the server has ended, or nothing.
        from_now: the reader is created at any moment, and reads only what commits
            later.
        lists_days: the reader reads the second day only after it has listed it.
        has_floors: claims start at the floors of the transactions that have ended.
        is_ordered: whether the order of keys is checked.
        cache: how many numbers a session draws at once.
        progress: the class of a lane's positions.
        seq_first: rows draw their number before their transaction has an id.
        subxids: rows have the id of their subtransaction.
        on_standby: the reader takes its snapshots on a standby.
        floors_by_xmax: xmax counts as the next id.
        claims_late: claims read late rows.
        finds_late: a takeover looks for late rows.
        up_to_last_seen: a claim that is cut counts as far as the table goes.
        snapshot_of_claim: the snapshot of the claim is stored, not one of the settle.
        settles: what a settle writes `together`, or first: `position` or `entries`.
        rebases: a restored dump is migrated before it is read.
        new_days_continue: a day that is read for the first time gets the position of
            the day before, whatever its rows.
        moves_fence: the last settlement of a day past is repeated for today.
        crosses: what a reader that survives a crash of the server keeps from its old
            session: its `batch`, if the lane was not settled since; its `progress`; its
            `floors`; or nothing but the broker's answers.
        is_broker: whether the server is also the broker, and loses what it took.
        trusts_acks: whether the broker's answers from before a crash count.
        set_back: by how many numbers the sequence is set back.
        slack: how many numbers below the floors claims read again.
        remembers_topics: a relay reads the topics when it takes the lane.
        begins_at_once: a topic begins in the snapshot of the transaction that adds it.
        starts_at_topic: a takeover starts where the last topic begins.
        from_oldest: a topic begins at the oldest row, in one transaction.
        oldest_moves_fence: that transaction stores a position.
        oldest_adds_entries: it adds entries of the rows that positions cover.
        return_moves_fence: a reader that returns stores a position.
        return_ends_entries: a reader that returns ends what waits.
    """

    scripts: Sequence[str]
    budget: Budget = _NOTHING_GOES_WRONG
    most: int = 1
    days: int = 1
    fence: str = "number"
    from_now: bool = False
    lists_days: bool = False
    has_floors: bool = True
    is_ordered: bool = True
    cache: int = 0
    progress: type[Progress] = Progress
    seq_first: bool = False
    subxids: bool = False
    on_standby: bool = False
    floors_by_xmax: bool = False
    claims_late: bool = True
    finds_late: bool = True
    up_to_last_seen: bool = False
    snapshot_of_claim: bool = True
    settles: str = "together"
    rebases: bool = True
    new_days_continue: bool = False
    moves_fence: bool = True
    crosses: str = ""
    is_broker: bool = False
    trusts_acks: bool = True
    set_back: int = 99
    slack: int = 0
    remembers_topics: bool = False
    begins_at_once: bool = False
    starts_at_topic: bool = False
    from_oldest: bool = False
    oldest_moves_fence: bool = True
    oldest_adds_entries: bool = True
    return_moves_fence: bool = True
    return_ends_entries: bool = True

    @property
    def keeps_numbers(self) -> bool:
        return bool(self.budget.losses or self.budget.returns or self.from_oldest)

    def start(self) -> State:
        database = Database(tuple(Writer(script) for script in self.scripts))
        if self.from_now:
            database = database._replace(start=None)
        return State(database, self.budget)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        self.check(state)
        is_end = True
        for step in self.possible(state):
            if step[1] != state:
                is_end = False
                yield step
        if is_end:
            self.check_end(state)

    def possible(self, state: State) -> Iterator[tuple[str, State]]:
        for number, writer in enumerate(state.database.writers):
            if writer.script and writer.status != ENDED:
                for name, database in self.write(state, number, writer):
                    yield f"writer {number} {name}", state._replace(database=database)
        yield from self.read(state)
        yield from self.happen(state)

    # Writers.

    def write(
        self, state: State, number: int, writer: Writer
    ) -> Iterator[tuple[str, Database]]:
        database = state.database
        what, script = writer.script[0], writer.script[1:]
        if what in ".?":
            yield "commits", _end(database, number, is_commit=True)
            if what == "?":
                yield "rolls back", _end(database, number, is_commit=False)
            return
        after = writer._replace(script=script)
        if what == "p":
            yield (
                "prepares",
                _with_writer(database, number, after._replace(status=PREPARED)),
            )
            return
        if what == ")":
            last = max(row.id for row in database.rows if _is_open(row, number))
            yield (
                "rolls back to the savepoint",
                _with_writer(database, number, after._replace(subxid=0))._replace(
                    rows=tuple(row for row in database.rows if row.id != last)
                ),
            )
            return
        key = {"(": "k", "N": "k", "S": "-", "O": "-"}.get(what, what)
        if key not in "-x" and any(
            row.key == key and not row.is_committed and row.writer != number
            for row in database.rows
        ):
            return  # Writers of a key wait for each other.
        next_seq = database.next_seq
        if self.seq_first and what != "x" and not writer.cached:
            yield (
                "draws a number",
                _with_writer(
                    database, number, writer._replace(cached=next_seq)
                )._replace(next_seq=next_seq + 1),
            )
            return
        next_xid = database.next_xid
        if not writer.xid:
            after = after._replace(status=OPEN, xid=next_xid)
            next_xid += 1
        if what == "x":
            yield (
                "gets an id",
                _with_writer(database, number, after)._replace(next_xid=next_xid),
            )
            return
        xid = after.xid
        if what == "(":
            after = after._replace(subxid=next_xid)
            next_xid += 1
            if self.subxids:
                xid = after.subxid
        if self.seq_first:
            seq, after = after.cached, after._replace(cached=0)
        elif self.cache:
            seq = after.cached or next_seq
            if not after.cached:
                next_seq += self.cache
            after = after._replace(cached=seq + 1)
        else:
            seq, next_seq = next_seq, next_seq + 1
        row = Row(
            _next_id(state),
            seq,
            xid,
            key,
            state.today,
            number,
            frozenset(
                row.id
                for row in database.rows
                if row.key == key != "-" and (row.is_committed or row.writer == number)
            ),
            what == "S",
            is_other=what == "O",
            is_added=what == "N",
        )
        yield (
            f"writes row {row.id} of key {key}, seq {seq}",
            _with_writer(database, number, after)._replace(
                next_xid=next_xid, next_seq=next_seq, rows=(*database.rows, row)
            ),
        )

    # The reader.

    def read(self, state: State) -> Iterator[tuple[str, State]]:
        database = state.database
        if database.start is None:
            snapshot = self.take_snapshot(database)
            created = database._replace(start=Position(database.next_seq - 1, snapshot))
            yield (
                "the reader is created",
                state._replace(
                    database=created,
                    exempt=frozenset(
                        row.id
                        for row in database.rows
                        if row.is_committed and not (row.is_added and self.from_oldest)
                    ),
                ),
            )
            return
        is_free = not any(owner and owner.has_lease for owner in state.owners)
        for number, owner in enumerate(state.owners):
            if owner is not None:
                yield from self.work(state, number, owner)
            elif is_free:
                is_free = False
                yield from self.take_over(state, number)

    def take_over(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        database = state.database
        if database.base is None:
            return
        days = DAYS[: self.days]
        if self.lists_days:
            days = DAYS[:1]
        owner = Owner(self.new_progress(state, days))
        if self.slack:
            floors = owner.floors.note(database.next_xid, database.next_seq - 1)
            owner = owner._replace(floors=floors)
        owner = owner._replace(entries=self.remember(database.entries))
        if self.remembers_topics or self.from_oldest:
            owner = owner._replace(topic=database.topic)
        yield "a relay takes the lane", _with_owner(state, number, owner)

    def new_progress(self, state: State, days: Iterable[Day]) -> Progress:
        """Do what `_take_over` does."""
        database = state.database
        assert database.start is not None
        days = [day for day in days if day not in database.dropped]
        lowest = find_lowest(database, days)
        if self.budget.drops:
            fence = fence_of(database.stored)
            first = min([*lowest, *fence, DAYS[state.today]])
            days = [day for day in days if day >= first]
        if not self.finds_late:
            lowest = {
                day: seq
                for day, seq in lowest.items()
                if seq > _position_of(database, day).up_to
            }
        if self.new_days_continue:
            lowest = {day: seq for day, seq in lowest.items() if day == DAYS[0]}
        start = database.start
        if self.starts_at_topic and database.topic is not None:
            start = database.topic
        return self.progress.take_over(
            dict.fromkeys(days, start),
            database.stored,
            self.take_snapshot(database),
            database.next_xid,
            lowest,
        )

    def remember(self, entries: tuple[tuple[int, str], ...]) -> Any:
        """Return the log as a process remembers it that may lose its lease."""
        return entries if self.budget.losses else ()

    def work(
        self, state: State, number: int, owner: Owner
    ) -> Iterator[tuple[str, State]]:
        if not owner.has_session:
            yield "the relay connects again", self.reconnect(state, number, owner)
        elif owner.unwritten is not None:
            yield (
                "the second transaction commits",
                _with_owner(state, number, owner._replace(unwritten=None))._replace(
                    database=self.second(state.database, owner)
                ),
            )
        elif owner.batch is None:
            if self.from_oldest and owner.topic != state.database.topic:
                yield "the relay sees the topic", _with_owner(state, number, None)
            if len(owner.progress.days) < self.days and not state.database.dropped:
                yield "the relay lists the days", self.list_days(state, number, owner)
            if self.moves_fence and (moved := self.move_fence(state, number, owner)):
                yield "the fence moves", moved
            yield from self.claim(state, number, owner)
        elif not owner.batch.is_published:
            yield from self.publish(state, number, owner, owner.batch)
        else:
            yield "the relay settles", self.settle(state, number, owner, owner.batch)

    def reconnect(self, state: State, number: int, owner: Owner) -> State:
        """Take the lane over, with the answers for a batch that was not settled."""
        database, batch = state.database, owner.batch
        if database.base is None:
            return state
        number_now = max((row.number for row in database.stored), default=0)
        is_changed = number_now != owner.progress.number
        acked = frozenset(batch.publish) if batch and self.trusts_acks else frozenset()
        new = Owner(
            self.new_progress(state, DAYS[: self.days]),
            has_lease=owner.has_lease,
            entries=self.remember(database.entries),
            acked=owner.acked | acked,
        )
        if self.crosses == "floors":
            new = new._replace(floors=owner.floors)
        elif self.crosses == "progress" and not is_changed:
            new = new._replace(progress=owner.progress, floors=owner.floors)
        elif self.crosses == "batch" and not is_changed:
            new = new._replace(progress=owner.progress, batch=batch)
        return _with_owner(state, number, new)

    def list_days(self, state: State, number: int, owner: Owner) -> State:
        progress = self.new_progress(state, DAYS[: self.days])
        return _with_owner(state, number, owner._replace(progress=progress))

    def move_fence(self, state: State, number: int, owner: Owner) -> State | None:
        """Do what `move_fences` does once a day has passed; then take the lane over."""
        progress = owner.progress
        if max(progress.fence) >= (today := DAYS[state.today]):
            return None
        moved = progress.move_fence(today)
        if moved is None:
            return None
        after, rows = moved
        if any((row.day, row.number) in state.database.numbers for row in rows):
            return _with_owner(state, number, None)
        state = state._replace(
            database=store_positions(state.database, rows, keep=self.keeps_numbers)
        )
        if owner.has_lease:
            after = self.new_progress(state, DAYS[: self.days])
        return _with_owner(state, number, owner._replace(progress=after))

    def claim(
        self, state: State, number: int, owner: Owner
    ) -> Iterator[tuple[str, State]]:
        """Do what one statement does: read the log, then the lane, in one snapshot."""
        database = state.database
        read = dict(owner.progress.days)
        if self.budget.drops and find_lowest(database, set(DAYS) - read.keys()):
            # Its look finds the row first.
            progress = self.new_progress(state, DAYS[: self.days])
            owner = owner._replace(progress=progress)
        entries = dict(database.entries if owner.has_lease else owner.entries)
        rows = {row.id: row for row in database.rows if row.is_committed}
        taken, going_on = self.claim_waiting(rows, entries)
        owner = owner._replace(entries=self.remember(tuple(sorted(entries.items()))))
        snapshot = self.take_snapshot(database)
        most = max(self.most - len(taken), 1)
        found, is_cut = self.scan(database, owner, snapshot, most)
        up_to = max((row.seq for row in found), default=-1)
        if self.up_to_last_seen and is_cut:
            up_to = max(row.seq for row in rows.values())
        next_xid = snapshot.xmax if self.floors_by_xmax else database.next_xid
        after = owner.progress.claimed(up_to, snapshot, next_xid, is_cut=is_cut)
        topic = owner.topic if self.remembers_topics else database.topic
        others = [row for row in found if not _brings(database, topic, row)]
        found = [row for row in found if row not in others]
        seen = max(position.up_to for _, position in after.days)
        owner = owner._replace(floors=owner.floors.note(next_xid, seen))
        if not taken and not found:
            if (after.days, after.as_of) != (owner.progress.days, owner.progress.as_of):
                yield (
                    "the relay finds nothing",
                    _with_owner(
                        state, number, forget_floors(owner._replace(progress=after))
                    ),
                )
            if others:
                batch = Batch((), (), (), frozenset(), after, is_published=True)
                yield (
                    "the relay stores that it has found nothing",
                    self.settle(state, number, owner, batch),
                )
            return
        waiting = {
            rows[id].key
            for id, entry in entries.items()
            if entry in WAITS_FOR_KEY and id in rows and id not in set(taken)
        } | going_on
        publish, held, scheduled = list(taken), [], []
        for row in found:
            if row.is_scheduled:
                scheduled.append(row.id)
            elif row.key != "-" and row.key in waiting:
                held.append(row.id)
            else:
                publish.append(row.id)
        batch = Batch(
            tuple(publish),
            tuple(held),
            tuple(scheduled),
            frozenset(DAYS[row.day] for row in found),
            after,
        )
        name = f"the relay claims {[*publish, *held, *scheduled]}"
        if self.budget.losses:
            yield name, _with_owner(state, number, owner._replace(batch=batch))
            return
        # If the lane has no other owner, a kill before the answer has the effect of one
        # before the claim. If nothing can come between, the settlement follows at once:
        # what writers do doesn't depend on the reader.
        budget = state.budget
        is_one_step = self.snapshot_of_claim and not (
            budget.kills or budget.crashes or budget.restores
        )
        for answer, answered in self.publish(state, number, owner, batch):
            published = answered.owners[number]
            assert published is not None
            if is_one_step and published.batch is not None:
                settled = self.settle(answered, number, published, published.batch)
                yield f"{name}, {answer}, settled", settled
            else:
                yield f"{name}, {answer}", answered

    def claim_waiting(
        self, rows: dict[int, Row], entries: dict[int, str]
    ) -> tuple[list[int], set[str]]:
        """Return the rows from the log, and the keys that have more there."""
        taken: list[int] = []
        going_on: set[str] = set()
        for key in sorted({rows[id].key for id in entries if id in rows}):
            waiting = sorted(
                (row.seq, id)
                for id, row in rows.items()
                if row.key == key and entries.get(id) in WAITS_FOR_KEY
            )
            for _, id in waiting:
                if entries[id] == REFUSED or len(taken) >= self.most:
                    if key != "-":
                        going_on.add(key)
                        break
                else:
                    taken.append(id)
        for id, entry in sorted(entries.items()):
            is_free = entry in {DUE_LATER, REPLAYED} and id in rows
            if is_free and len(taken) < self.most:
                taken.append(id)
        return taken, going_on

    def scan(
        self, database: Database, owner: Owner, snapshot: Snapshot, most: int
    ) -> tuple[list[Row], bool]:
        """Do what `claim.sql` does with the parts of a lane."""
        as_of, base = owner.progress.as_of, _base(database)
        hidden = owner.progress.find_hidden(owner.floors)
        floor = None if hidden is None else hidden.find_floor(snapshot)
        found = []
        for part in owner.progress.parts():
            up_to = part.position.up_to
            start = part.start if floor is None else min(part.start, floor)
            if not self.has_floors and as_of is None:
                start = -1
            if not self.claims_late:
                start = up_to
            if self.slack and as_of is None:
                floors = [owner.floors.of(owner.progress.next_xid)]
                floors += [] if floor is None else [floor]
                start = min(start, min(floors) - self.slack)
            found += [
                row
                for row in database.rows
                if row.is_committed
                and part.oldest <= DAYS[row.day].starts_at < part.newest
                and row.seq > start
                and (
                    row.seq > up_to
                    or (row.seq > base and not part.position.snapshot.visible(row.xid))
                )
                and (as_of is None or as_of.visible(row.xid))
            ]
        found.sort(key=lambda row: row.seq)
        if len(found) <= most:
            return found, False
        # WITH TIES: the sequence may have been set back.
        last = found[most - 1].seq
        taken = [row for row in found if row.seq <= last]
        return taken, len(taken) < len(found)

    def publish(
        self, state: State, number: int, owner: Owner, batch: Batch
    ) -> Iterator[tuple[str, State]]:
        ids = batch.publish

        def answered(acked: Iterable[int], **answers: Any) -> State:
            acked = tuple(acked)
            rest = batch._replace(publish=acked, is_published=True, **answers)
            new = [id for id in acked if id not in owner.acked]
            return _with_owner(
                self.accept(state, new), number, owner._replace(batch=rest)
            )

        yield "the broker takes all", answered(ids)
        budget = state.budget
        keys = {row.id: row.key for row in state.database.rows}
        if budget.refusals:
            for index, id in enumerate(ids):
                if id in owner.acked:
                    continue
                behind = [
                    other
                    for other in ids[index + 1 :]
                    if keys[id] == keys[other] != "-"
                ]
                refused = answered(
                    [other for other in ids if other != id and other not in behind],
                    refused=(id,),
                    held=(*batch.held, *behind),
                )
                yield (
                    f"the broker refuses row {id}",
                    refused._replace(
                        budget=budget._replace(refusals=budget.refusals - 1)
                    ),
                )
        if budget.outages:
            yield (
                "the broker takes nothing",
                _with_owner(state, number, owner._replace(batch=None))._replace(
                    budget=budget._replace(outages=budget.outages - 1)
                ),
            )
        if budget.partial:
            for count in range(1, len(ids)):
                yield (
                    f"the broker answers for {count} rows",
                    answered(ids[:count], unknown=ids[count:])._replace(
                        budget=budget._replace(partial=budget.partial - 1)
                    ),
                )

    def accept(self, state: State, ids: Iterable[int]) -> State:
        """Let the broker accept rows in this order."""
        rows = {row.id: row for row in state.database.rows}
        published = set(state.published)
        for id in ids:
            row = rows.get(id)
            if row is None:
                continue  # Lost in a crash since the claim.
            if row.is_other:
                raise BrokenPromiseError(f"row {id} was published to another reader")
            if id not in state.replayed:
                missing = {
                    other
                    for other in row.after - published - state.exempt
                    if other in rows
                    and rows[other].is_committed
                    and not rows[other].is_scheduled
                    and is_own(state.database, rows[other])
                }
                if self.is_ordered and missing:
                    raise BrokenPromiseError(
                        f"row {id} was published before {sorted(missing)} of its key"
                    )
                if id in published and not state.may_repeat:
                    raise BrokenPromiseError(f"row {id} was published twice")
            published.add(id)
        return state._replace(published=frozenset(published))

    def settle(self, state: State, number: int, owner: Owner, batch: Batch) -> State:
        database = state.database
        if self.from_oldest and database.adding is not None:
            return state  # It waits for the lock on the table of positions.
        after, rows = batch.after.settle(batch.days)
        if after.number > 4 * len(database.rows) + 8:
            raise BrokenPromiseError(f"row {batch.publish} is claimed again and again")
        if not self.snapshot_of_claim:
            newer = self.take_snapshot(database)
            rows = [
                row._replace(position=row.position._replace(snapshot=newer))
                for row in rows
            ]
        is_refused = self.fence == "session" and not owner.has_lease
        if self.fence == "number":
            is_refused = any(
                (row.day, row.number) in database.numbers or row.day in database.dropped
                for row in rows
            )
        if is_refused:
            # It forgets what it remembers, and takes over if the lane is still its.
            return _with_owner(state, number, None)
        positions = store_positions(database, rows, keep=self.keeps_numbers)
        entries = dict(database.entries)
        for id in batch.publish:
            entries.pop(id, None)
        entries |= dict.fromkeys(batch.refused, REFUSED)
        entries |= dict.fromkeys(batch.unknown, DUE)
        entries |= dict.fromkeys(batch.held, BLOCKED)
        entries |= dict.fromkeys(batch.scheduled, SCHEDULED)
        logged = tuple(sorted(entries.items()))
        new = forget_floors(
            owner._replace(
                progress=after,
                batch=None,
                entries=self.remember(logged),
                acked=frozenset(),
            )
        )
        if self.settles == "position" and logged != database.entries:
            database, second = positions, positions._replace(entries=logged)
            new = new._replace(unwritten=second)
        elif self.settles == "entries" and logged != database.entries:
            database = database._replace(entries=logged)
            new = new._replace(unwritten=positions)
        else:
            database = positions._replace(entries=logged)
        return _with_owner(state, number, new if owner.has_lease else None)._replace(
            database=database
        )

    def second(self, database: Database, owner: Owner) -> Database:
        assert owner.unwritten is not None
        if self.settles == "position":
            return database._replace(entries=owner.unwritten.entries)
        return database._replace(stored=owner.unwritten.stored)

    def take_snapshot(self, database: Database) -> Snapshot:
        """Return `pg_current_snapshot()`."""
        xmax = database.ended + 1
        running = [writer.xid for writer in database.writers if 0 < writer.xid < xmax]
        if self.on_standby:
            return Snapshot(xmax, xmax)
        return Snapshot(min(running, default=xmax), xmax, frozenset(running))

    # Events.

    def add_topic(self, database: Database) -> Iterator[tuple[str, Database]]:
        """Do what `outbox.subscribe` does, each time in a transaction of its own."""
        if database.adding is not None and self.from_oldest:
            yield "the topic is there", self.begin_at_oldest(database, database.adding)
        elif database.adding is not None:
            if database.is_dropped and database.returned is None:
                database = self.return_at(database, database.adding)
            has_begun = self.begins_at_once or database.topic is not None
            yield (
                "the topic is there" if has_begun else "the topic is added",
                database._replace(
                    topic=database.adding, adding=None, has_begun=has_begun
                ),
            )
        elif not database.has_begun and database.start is not None:
            since = Position(database.next_seq - 1, self.take_snapshot(database))
            yield "a process adds the topic", database._replace(adding=since)

    def begin_at_oldest(self, database: Database, seen: Position) -> Database:
        """Add entries of the rows that were seen and are covered."""
        number = max((row.number for row in database.stored), default=0) + 1
        days = DAYS[: self.days]
        fence = [Stored(day, number, _position_of(database, day)) for day in days]
        entries = {
            row.id: DUE
            for row in database.rows
            if row.is_added and is_covered(database, row)
            if seen.covers(row.seq, row.xid, _base(database))
        }
        if self.oldest_moves_fence:
            database = store_positions(database, fence, keep=True)
        if self.oldest_adds_entries:
            entries |= dict(database.entries)
            database = database._replace(entries=tuple(sorted(entries.items())))
        return database._replace(topic=Position(), adding=None, has_begun=True)

    def return_at(self, database: Database, since: Position) -> Database:
        """End what waits, and begin anew."""
        number = max((row.number for row in database.stored), default=0) + 1
        rows = [Stored(day, number, since) for day in DAYS[: self.days]]
        if self.return_moves_fence:
            database = store_positions(database, rows, keep=True)
        if self.return_ends_entries:
            database = database._replace(entries=())
        return database._replace(returned=since)

    def happen(self, state: State) -> Iterator[tuple[str, State]]:
        database, budget = state.database, state.budget
        if database.is_dropped or any("N" in script for script in self.scripts):
            for name, added in self.add_topic(database):
                may_repeat = state.may_repeat or self.from_oldest
                yield name, state._replace(database=added, may_repeat=may_repeat)
        if budget.returns:
            yield (
                "the reader is dropped",
                state._replace(
                    database=database._replace(is_dropped=True),
                    budget=budget._replace(returns=budget.returns - 1),
                    may_repeat=True,
                ),
            )
        for id, entry in database.entries:
            if entry in {REFUSED, SCHEDULED}:
                due = {
                    **dict(database.entries),
                    id: DUE if entry == REFUSED else DUE_LATER,
                }
                yield (
                    f"row {id} is due",
                    state._replace(
                        database=database._replace(entries=tuple(sorted(due.items())))
                    ),
                )
        for number, owner in enumerate(state.owners):
            if owner is None:
                continue
            if budget.kills:
                yield (
                    "the relay is killed",
                    _with_owner(state, number, None)._replace(
                        budget=budget._replace(kills=budget.kills - 1), may_repeat=True
                    ),
                )
            if budget.losses and owner.has_lease:
                yield (
                    "the relay loses the lane",
                    _with_owner(
                        state, number, owner._replace(has_lease=False)
                    )._replace(
                        budget=budget._replace(losses=budget.losses - 1),
                        may_repeat=True,
                    ),
                )
        if budget.midnights and state.today + 1 < self.days:
            yield (
                "midnight",
                state._replace(
                    today=state.today + 1,
                    budget=budget._replace(midnights=budget.midnights - 1),
                ),
            )
        if budget.steps_back and state.today:
            yield (
                "the clock steps back",
                state._replace(
                    today=state.today - 1,
                    budget=budget._replace(steps_back=budget.steps_back - 1),
                ),
            )
        if budget.drops and self.can_drop(state):
            yield "the first day is dropped", self.drop(state)
        if budget.crashes:
            if state.flushed is None:
                yield (
                    "the WAL is flushed",
                    state._replace(flushed=database, kept=state.published),
                )
            else:
                yield "the server crashes", self.crash(state, state.flushed)
        if budget.restores:
            for next_xid in (1, database.next_xid + 3):
                yield (
                    f"a dump is restored, next id {next_xid}",
                    self.restore(state, next_xid),
                )
        if database.base is None and _all_committed(database):
            yield "pillarbox migrate", state._replace(database=migrate(database))
        if budget.by_hand and database.start is not None:
            for seq in sorted(
                {1, max(database.next_seq - 1, 1), database.next_seq + 1}
            ):
                yield (
                    f"the owner inserts seq {seq}",
                    self.insert_by_hand(state, seq),
                )
        if budget.resets and database.next_seq > 1:
            seq = max(1, database.next_seq - self.set_back)
            yield (
                f"the sequence is set back to {seq}",
                state._replace(
                    database=database._replace(next_seq=seq),
                    budget=budget._replace(resets=budget.resets - 1),
                ),
            )
        if budget.replays:
            entries = dict(database.entries)
            for row in database.rows:
                if (
                    row.id in state.published
                    and row.id not in entries
                    and (is_covered(database, row) or row.id in database.logged)
                ):
                    replayed = {**entries, row.id: REPLAYED}
                    yield (
                        f"row {row.id} is replayed",
                        state._replace(
                            database=database._replace(
                                entries=tuple(sorted(replayed.items()))
                            ),
                            budget=budget._replace(replays=budget.replays - 1),
                            replayed=state.replayed | {row.id},
                        ),
                    )

    def can_drop(self, state: State) -> bool:
        """Do what the gate of a day does, long after the fence has moved."""
        database, day = state.database, DAYS[0]
        entries = dict(database.entries)
        if not state.today or day in database.dropped:
            return False
        if self.moves_fence and any(
            owner is not None and day in dict(owner.progress.days)
            for owner in state.owners
        ):
            return False
        return all(
            DAYS[row.day] != day
            or row.is_other
            or (
                row.is_committed and is_covered(database, row) and row.id not in entries
            )
            for row in database.rows
        )

    def drop(self, state: State) -> State:
        database, day = state.database, DAYS[0]
        return state._replace(
            database=database._replace(
                rows=tuple(row for row in database.rows if DAYS[row.day] != day),
                stored=tuple(row for row in database.stored if row.day != day),
                numbers=frozenset(n for n in database.numbers if n[0] != day),
                dropped=database.dropped | {day},
            ),
            budget=state.budget._replace(drops=state.budget.drops - 1),
            lost=_next_id(state) - 1,
        )

    def crash(self, state: State, flushed: Database) -> State:
        """Continue with what was flushed; ids and numbers after it are used again."""
        writers = tuple(
            old
            if old.status in {PREPARED, ENDED} or (old == new and old.status == NEW)
            else Writer("", ENDED)
            for old, new in zip(flushed.writers, state.database.writers, strict=True)
        )
        rows = tuple(
            row
            for row in flushed.rows
            if row.is_committed or flushed.writers[row.writer].status == PREPARED
        )
        ended = max(
            [flushed.ended, *(row.xid for row in flushed.rows if row not in rows)]
        )
        highest = max([ended, *(row.xid for row in rows), *(w.xid for w in writers)])
        up_to = [row.position.up_to for row in flushed.stored]
        return state._replace(
            database=flushed._replace(
                writers=writers,
                rows=rows,
                ended=ended,
                next_xid=highest + 1,
                next_seq=max([0, *up_to, *(row.seq for row in flushed.rows)]) + 1,
            ),
            budget=state.budget._replace(crashes=state.budget.crashes - 1),
            owners=_without_sessions(state.owners),
            published=state.kept if self.is_broker else state.published,
            may_repeat=True,
            lost=_next_id(state) - 1,
        )

    def restore(self, state: State, next_xid: int) -> State:
        """Continue with a dump of the committed rows in a new cluster."""
        database = state.database
        return state._replace(
            database=database._replace(
                writers=tuple(
                    writer
                    if writer.status == NEW and writer.script
                    else Writer("", ENDED)
                    for writer in database.writers
                ),
                rows=tuple(row for row in database.rows if row.is_committed),
                next_xid=next_xid,
                ended=next_xid - 1,
                base=None if self.rebases else -1,
            ),
            budget=state.budget._replace(restores=state.budget.restores - 1),
            owners=(None, None),
            may_repeat=True,
            lost=_next_id(state) - 1,
        )

    def insert_by_hand(self, state: State, seq: int) -> State:
        database, budget = state.database, state.budget
        row = Row(
            _next_id(state), seq, database.next_xid, "-", state.today, 0, frozenset()
        )
        return state._replace(
            database=database._replace(
                next_xid=database.next_xid + 1,
                ended=database.next_xid,
                rows=(*database.rows, row._replace(is_committed=True)),
            ),
            budget=budget._replace(by_hand=budget.by_hand - 1),
        )

    # Promises.

    def check(self, state: State) -> None:
        database = state.database
        if database.start is None or database.base is None:
            return
        entries = dict(database.entries)
        for row in database.rows:
            if (
                row.id in entries
                and database.returned is not None
                and database.returned.covers(row.seq, row.xid, _base(database))
            ):
                raise BrokenPromiseError(f"row {row.id} is from before the return")
            if not (row.is_committed and is_own(database, row)) or (
                row.id in state.exempt
            ):
                continue
            is_done, entry = is_covered(database, row), entries.get(row.id)
            if is_done and entry is None and row.id not in state.published:
                raise BrokenPromiseError(f"row {row.id} was passed by")
            is_ahead = row.id in database.logged
            if is_ahead and entry is None and row.id not in state.published:
                raise BrokenPromiseError(f"row {row.id} was ended, and not handled")
            if entry not in {None, REPLAYED} and not (is_done or is_ahead):
                raise BrokenPromiseError(f"row {row.id} is {entry}, and not covered")
        if early := (state.exempt & state.published) - state.replayed:
            raise BrokenPromiseError(f"rows {sorted(early)} are not the reader's")

    def check_end(self, state: State) -> None:
        entries = dict(state.database.entries)
        for row in state.database.rows:
            if not (row.is_committed and is_own(state.database, row)) or (
                row.id in state.exempt
            ):
                continue
            if row.id not in state.published or row.id in entries:
                raise BrokenPromiseError(f"row {row.id} is never published")


def is_own(database: Database, row: Row) -> bool:
    """Whether the reader gets a row, as the views say."""
    return _brings(database, database.topic, row) and (
        database.has_begun or not (row.is_added or database.is_dropped)
    )


def _brings(database: Database, topic: Position | None, row: Row) -> bool:
    if row.is_added or database.is_dropped:
        return topic is not None and not topic.covers(row.seq, row.xid, _base(database))
    return not row.is_other


def is_covered(database: Database, row: Row) -> bool:
    """Return whether the stored position of its day covers a row."""
    return _position(database, row).covers(row.seq, row.xid, _base(database))


def find_lowest(database: Database, days: Iterable[Day]) -> dict[Day, int]:
    """Return the lowest row of each day that its position doesn't cover."""
    rows = [
        (DAYS[row.day], row.seq)
        for row in database.rows
        if row.is_committed and not is_covered(database, row)
    ]
    lowest = dict(sorted(rows, reverse=True))
    return {day: lowest[day] for day in days if day in lowest}


def migrate(database: Database) -> Database:
    """Do what `pillarbox migrate` does in a new cluster, while nobody writes.

    Rows of the old cluster are covered by their seq alone from now on. Those at or
    below the position of their day that it doesn't cover get an entry.
    """
    assert database.start is not None
    found = {
        row.id: DUE
        for row in database.rows
        if row.seq <= _position(database, row).up_to
        and not (row.is_other or is_covered(database, row))
    }
    number = max((row.number for row in database.stored), default=0) + 1
    rows = [
        Stored(row.day, number, Position(row.position.up_to)) for row in database.stored
    ]
    return store_positions(database, rows)._replace(
        start=Position(database.start.up_to),
        entries=tuple(sorted({**dict(database.entries), **found}.items())),
        base=database.next_seq - 1,
    )


def _end(database: Database, number: int, *, is_commit: bool) -> Database:
    writer = database.writers[number]
    _, _, script = writer.script.partition("|")
    rows = []
    for row in database.rows:
        if not _is_open(row, number):
            rows.append(row)
        elif is_commit:
            rows.append(row._replace(is_committed=True))
    ended = Writer(
        script, NEW if script else ENDED, cached=writer.cached * bool(script)
    )
    return _with_writer(database, number, ended)._replace(
        rows=tuple(rows), ended=max(database.ended, writer.xid, writer.subxid)
    )


def _with_writer(database: Database, number: int, writer: Writer) -> Database:
    writers = database.writers
    return database._replace(
        writers=(*writers[:number], writer, *writers[number + 1 :])
    )


def _with_owner(state: State, number: int, owner: Owner | None) -> State:
    first, second = state.owners
    return state._replace(owners=(first, owner) if number else (owner, second))


def _without_sessions(
    owners: tuple[Owner | None, Owner | None],
) -> tuple[Owner | None, Owner | None]:
    first, second = (
        owner and owner._replace(has_session=False, unwritten=None) for owner in owners
    )
    return first, second


def forget_floors(owner: Owner) -> Owner:
    """Forget what no claim needs any more."""
    return owner._replace(floors=owner.floors.forget(owner.progress.snapshot.xmin))


def _is_open(row: Row, number: int) -> bool:
    return row.writer == number and not row.is_committed


def _all_committed(database: Database) -> bool:
    return all(row.is_committed for row in database.rows)


def _next_id(state: State) -> int:
    return max([state.lost, *(row.id for row in state.database.rows)]) + 1


def _base(database: Database) -> int:
    return -1 if database.base is None else database.base


def _position(database: Database, row: Row) -> Position:
    return _position_of(database, DAYS[row.day])


def _position_of(database: Database, day: Day) -> Position:
    assert database.start is not None
    for stored in database.stored:
        if stored.day == day:
            return stored.position
    return database.start


def store_positions(
    database: Database, rows: Iterable[Stored], *, keep: bool = False
) -> Database:
    """Insert rows into the table of positions, which keeps all of them."""
    rows = list(rows)
    last = {row.day: row for row in (*database.stored, *rows)}
    numbers = {(row.day, row.number) for row in rows} if keep else set()
    return database._replace(
        stored=tuple(sorted(last.values())), numbers=database.numbers | numbers
    )
