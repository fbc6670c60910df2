-- Does:  Read the log above an entry: which keys have waiting messages, and when the first is due.
-- Takes: lanes, entries (same length; -1: read all of it)
-- Gives: lane, key (null: messages that don't block their key), has_head (a refused message waits), has_ended (a message has stopped waiting), and the lowest seq, due_at and created_at of the waiting messages
-- Index: deferral_pkey on every partition
SELECT lane, key, bool_or(waits AND cause <> 'blocked') AS has_head, bool_or(NOT waits) AS has_ended,
       min(seq) FILTER (WHERE waits), min(due_at) FILTER (WHERE waits), min(created_at) FILTER (WHERE waits)
  FROM (
      SELECT DISTINCT ON (d.id) d.lane, d.seq, d.cause, d.due_at, d.created_at, d.cause <> 'settled' AS waits, read.entry,
             CASE WHEN d.cause NOT IN ('scheduled', 'replayed') THEN d.key END AS key
        FROM unnest(%(lanes)s::smallint[], %(entries)s::bigint[]) AS read (lane, entry)
       CROSS JOIN LATERAL (
           SELECT *
             FROM outbox.deferral AS new
            WHERE new.lane = read.lane
              AND new.entry > read.entry
            -- By the index: how few there are is not in the statistics.
            ORDER BY new.entry
       ) AS d
       ORDER BY d.id, d.run DESC, (d.cause = 'settled') DESC, d.entry DESC
  ) AS last
 WHERE waits OR entry >= 0 AND key IS NOT NULL
 GROUP BY lane, key
