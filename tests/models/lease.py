"""A model of two relays that share lanes by leases, and a server that can end sessions.

Each relay decides with the real `Ownership`. The model covers the sessions and their
locks, `idle_session_timeout`, and network delays of any length. Time passes in ticks; a
lease lasts `LIMIT` of them. A relay that is frozen or waits for the network does
nothing before the next tick, which can happen at any point and any number of times.
Elapsed time is counted only up to the limit, so the number of states is finite, and
all of them are visited.

Every state is checked:

- Two relays never both hold a lane, unless the server ended a session early (by a
  restart or `pg_terminate_backend`) and the relay could not have noticed yet.
- A lane that nobody holds is held again within the limit, counted from when the server
  last heard from the relay whose lane it was, plus two heartbeats, in which a relay
  that works all the time joins and takes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from pillarbox.outbox.postgres.lease import Ownership
from tests.models.explore import BrokenPromiseError

LIMIT: Final = 3
LANES: Final = (0, 1)
GONE: Final = -1
"""The remaining validity of a lease that has expired or was never taken."""


class Request(NamedTuple):
    """A statement on its way to the server, or its answer on the way back."""

    kind: str
    lanes: frozenset[int] = frozenset()
    wanted: int = 0
    is_answer: bool = False
    failed: bool = False
    members: int = 0


class Relay(NamedTuple):
    """The state of a relay, and the server's side of its session."""

    held: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    in_use: frozenset[int] = frozenset()
    joined: bool = False
    valid_for: int = GONE
    """Ticks until it stops relying on its locks."""
    request: Request | None = None
    sent: int = 0
    """Ticks since the heartbeat in progress was sent."""
    has_beaten: bool = False
    """Whether it has sent its heartbeat in this tick."""
    connected: bool = False
    """Whether it has a connection, which the server may have closed."""
    has_session: bool = False
    idle: int = 0
    """Ticks since the server last heard from it."""
    locks: frozenset[int] = frozenset()
    is_member: bool = False
    ended_early: bool = False
    """Whether the server ended its session early and it has not noticed yet."""


class State(NamedTuple):
    relays: tuple[Relay, ...]
    unheld: int
    """Ticks since a relay held the first lane, or the server heard from the first
    relay, while the last relay was working. The lanes are interchangeable, and so are
    the relays."""


@dataclass(frozen=True)
class LeaseModel:
    """The possible steps of two relays.

    Args:
        ownership: the class by which they decide.
        unlocks_first: a relay stops using a lane only after the lock is released.
        has_timeout: the server ends idle sessions.
        counts_from_the_answer: a lease starts at the answer to its heartbeat.
        trusts_its_connection: a relay doesn't ask which locks it holds.
        is_one_steady: the second relay sends a heartbeat in every tick and keeps its
            session. Otherwise it can freeze between heartbeats and lose its session.
    """

    ownership: type[Ownership] = Ownership
    unlocks_first: bool = False
    has_timeout: bool = True
    counts_from_the_answer: bool = False
    trusts_its_connection: bool = False
    is_one_steady: bool = True

    def start(self) -> State:
        return State((Relay(), Relay()), 0)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        self._check(state)
        for name, after in self._possible(state):
            is_held = self._holders(after, LANES[0])
            before, other = state.relays[0], after.relays[0]
            is_heard = other.has_session and other.idle < max(before.idle, 1)
            if is_held or is_heard:
                after = after._replace(unheld=0)
            yield name, after

    def _possible(self, state: State) -> Iterator[tuple[str, State]]:
        for number, relay in enumerate(state.relays):
            if number:
                yield from self._other(state, relay)
                continue
            for name, after in self._relay(state, number, relay):
                yield f"relay {number} {name}", _with(state, number, after)
        if self.is_one_steady and not state.relays[1].has_beaten:
            return
        if not self.has_timeout or all(
            relay.idle < LIMIT for relay in state.relays if relay.has_session
        ):
            yield "a tick", self._tick(state)

    def _other(self, state: State, relay: Relay) -> Iterator[tuple[str, State]]:
        is_cut_off = relay.connected and not relay.has_session
        if not relay.has_beaten and not is_cut_off:
            yield "the other relay sends a heartbeat", self._beat_at_once(state)
        if is_cut_off:
            yield "the other relay hears of it", _with(state, 1, self._lose(relay))
        if relay.has_session and not self.is_one_steady:
            ended = _with(state, 1, self._end_session(relay))
            yield "the other relay loses its session", ended

    def _relay(
        self, state: State, number: int, relay: Relay
    ) -> Iterator[tuple[str, Relay]]:
        request = relay.request
        if request is None:
            if not relay.has_beaten:
                yield from self._beat(relay)
            if relay.connected and not relay.has_session:
                yield "hears that its session has ended", self._lose(relay)
        elif request.is_answer:
            yield f"gets the answer to {request.kind}", self._answered(relay, request)
        elif not relay.has_session and relay.connected:
            failed = request._replace(is_answer=True, failed=True)
            yield f"fails with {request.kind}", relay._replace(request=failed)
        else:
            yield f"has {request.kind} run", self._run(state, number, relay, request)
        if relay.in_use:
            yield "leaves its lane", relay._replace(in_use=frozenset())
        elif self._own(relay).holds([0], 0):
            yield "uses a lane", relay._replace(in_use=frozenset([0]))
        if relay.has_session:
            yield "loses its session", self._end_session(relay)

    def _end_session(self, relay: Relay) -> Relay:
        return relay._replace(
            has_session=False,
            locks=frozenset(),
            is_member=False,
            idle=0,
            ended_early=relay.idle < LIMIT,
        )

    def _beat(self, relay: Relay) -> Iterator[tuple[str, Relay]]:
        own = self._own(relay)
        if own.has_expired(0):
            relay = self._lose(relay)
        yield (
            "sends a heartbeat",
            relay._replace(request=Request("list_lock_holders"), sent=0),
        )
        if relay.connected and not relay.has_session:
            # It knows that its connection is closed, and reopens it silently.
            yield (
                "sends a heartbeat on a new connection",
                relay._replace(
                    request=Request("list_lock_holders"), sent=0, connected=False
                ),
            )

    def _beat_at_once(self, state: State) -> State:
        _, relay = next(self._beat(state.relays[1]))
        while relay.request is not None:
            relay = self._run(state, 1, relay, relay.request)
            assert relay.request is not None
            relay = self._answered(relay, relay.request)
        return _with(state, 1, relay)

    def _run(self, state: State, number: int, relay: Relay, request: Request) -> Relay:
        """Run a statement on the server."""
        if not relay.connected:
            relay = relay._replace(connected=True, has_session=True)
        relay = relay._replace(idle=0)
        others = [r for n, r in enumerate(state.relays) if n != number]
        match request.kind:
            case "list_lock_holders":
                if not relay.joined:
                    relay = relay._replace(is_member=True)
                members = sum(r.is_member for r in (relay, *others))
                answer = request._replace(lanes=relay.locks, members=max(1, members))
            case "take_lanes":
                free = request.lanes.difference(*(other.locks for other in others))
                taken = frozenset(sorted(free)[: request.wanted])
                relay = relay._replace(locks=relay.locks | taken)
                answer = request._replace(lanes=taken)
            case _:
                relay = relay._replace(locks=relay.locks - request.lanes)
                answer = request
        return relay._replace(request=answer._replace(is_answer=True))

    def _answered(self, relay: Relay, request: Request) -> Relay:
        if request.failed:
            return self._lose(relay)
        own = self._own(relay)
        following = None
        match request.kind:
            case "list_lock_holders":
                sent = 0 if self.counts_from_the_answer else -relay.sent
                locked = relay.held if self.trusts_its_connection else request.lanes
                had_expired = own.has_expired(0)
                own.renew(sent, locked)
                if had_expired or not own.is_valid(0):
                    return self._lose(relay)
                free, wanted = own.balance(LANES, request.members)
                if self.unlocks_first:
                    own.take(free)
                if free:
                    following = Request("release_lanes", free)
                elif wanted:
                    offered = frozenset(LANES) - own.held
                    following = Request("take_lanes", offered, wanted)
                # It knows again which locks it holds.
                relay = relay._replace(ended_early=False, joined=True)
                if not relay.has_session:
                    relay = relay._replace(ended_early=True)
            case "take_lanes":
                own.take(request.lanes)
                if not relay.has_session:
                    relay = relay._replace(ended_early=True)
            case _:
                if self.unlocks_first:
                    own.held -= request.lanes
        return _keep(relay, own)._replace(
            request=following, has_beaten=following is None
        )

    def _lose(self, relay: Relay) -> Relay:
        """Do what `_lose_all` does, and end the session on the server."""
        own = self._own(relay)
        own.lose_all()
        return _keep(relay, own)._replace(
            request=None,
            joined=False,
            sent=0,
            connected=False,
            has_session=False,
            locks=frozenset(),
            is_member=False,
            idle=0,
            ended_early=False,
        )

    def _tick(self, state: State) -> State:
        unheld = state.unheld + 1 if _is_at_work(state.relays[-1]) else 0
        relays = tuple(
            relay._replace(
                valid_for=max(relay.valid_for - 1, 0 if relay.valid_for >= 0 else GONE),
                sent=min(relay.sent + 1, LIMIT + 1) if relay.request else 0,
                has_beaten=False,
                idle=min(relay.idle + 1, LIMIT) if relay.has_session else 0,
            )
            for relay in state.relays
        )
        return State(relays, unheld)

    def _holders(self, state: State, lane: int) -> list[Relay]:
        return [r for r in state.relays if self._own(r).holds([lane], 0)]

    def _check(self, state: State) -> None:
        for lane in LANES:
            holders = self._holders(state, lane)
            if len([relay for relay in holders if not relay.ended_early]) > 1:
                raise BrokenPromiseError(f"two relays hold lane {lane}")
        if state.unheld > LIMIT + 2:
            raise BrokenPromiseError(f"nobody holds lane {LANES[0]} for too long")

    def _own(self, relay: Relay) -> Ownership:
        own = self.ownership(LIMIT)
        if relay.joined:
            own.renew(relay.valid_for - LIMIT * 0.8, ())
        own.held, own.leaving, own.in_use = relay.held, relay.leaving, relay.in_use
        return own


def _with(state: State, number: int, relay: Relay) -> State:
    relays = list(state.relays)
    relays[number] = relay
    return state._replace(relays=tuple(relays))


def _is_at_work(relay: Relay) -> bool:
    """Return whether it has sent its heartbeat in this tick and its session is open."""
    return relay.has_beaten and relay.joined and relay.has_session


def _keep(relay: Relay, own: Ownership) -> Relay:
    valid_for = GONE
    if own.is_member:
        valid_for = next((t for t in range(LIMIT + 2) if not own.is_valid(t)), LIMIT)
    return relay._replace(
        held=own.held, leaving=own.leaving, in_use=own.in_use, valid_for=valid_for
    )
