"""How far a reader of a log has read it: positions.

A *log* is a table of messages in daily partitions. A *reader* reads it lane by lane, in
order of seq, and stores for each lane and day how far it is: a *position*, that is a
seq and the snapshot in which the reader read it. A row is *covered* if its seq is at or
below that seq and its transaction is visible in that snapshot. So a row that commits
late, below the position, is recognized: its transaction isn't visible there.

A message is done if it is covered and the log of exceptions has no open entry for it.

- `position.py`: snapshots and positions.
- `hidden.py`: how far below its position a claim must search for late rows.
- `progress.py`: the positions of a lane, day by day, from claim to settlement.
- `window.py`: the same for a consumer, whose deliveries end out of order.

These are values and bookkeeping without I/O; `tests/models/log.py` tries them in every
interleaving up to a bound. `reader.py` has the three parts that need SQL:

- `takeover.py`: finds where the claims of a lane start.
- `claims.py`: what a claim must read.
- `settlements.py`: stores positions.
"""
