"""Reads the outbox, for relays and for consumers without a broker.

`process.py` starts and drains the parts; `claim.py` reads messages, `settle.py` stores
the outcomes, `lanes/` has the lanes between the two.

The outbox is a *log*: messages in daily partitions. A *reader* reads it lane by lane,
in order of seq, and stores for each lane and day how far it is: a *position*, that is a
seq and the snapshot in which the reader read it. A row is *covered* if its seq is at or
below that seq and its transaction is visible in that snapshot. So a row that commits
late, below the position, is recognized: its transaction isn't visible there.

A message is done if it is covered and the log of exceptions has no open entry for it.

- `position.py`: snapshots and positions.
- `hidden.py`: how far below its position a claim must search for late rows.
- `progress.py`: the positions of a lane, day by day, from claim to settlement.
- `window.py`: the same for a consumer, whose deliveries end out of order.

These are values and bookkeeping without I/O; `tests/models/log.py` tries them in every
interleaving up to a bound. `takeover.py` finds where the claims of a lane start, and
`claims.py` what a claim must read.
"""
