-- Does:  Read the log above an entry, in portions: which keys have waiting messages, and when the first is due.
-- Takes: reader, lanes, entries (same length; -1: from the beginning), max_rows (the entries read of each lane)
-- Gives: key (null: messages that don't block their key), has_head (a refused message waits), has_ended (a message has stopped waiting), the lowest seq, due_at and created_at of the waiting messages, lane, top, cut; and for each lane with entries one row with top, their highest seq, and if there may be more with cut, the last one that was read; has_head there: the sequence was set back below it
-- Index: deferral_pkey on every partition
WITH portion AS MATERIALIZED (
    SELECT d.*, read.entry AS above
      FROM unnest(%(lanes)s::smallint[], %(entries)s::bigint[]) AS read (lane, entry)
     CROSS JOIN LATERAL (
         SELECT new.id, new.run, new.entry, new.lane, new.seq, new.cause, new.key, new.due_at, new.created_at
           FROM outbox.deferral AS new
          WHERE new.reader = %(reader)s
            AND new.lane = read.lane
            AND new.entry > read.entry
          ORDER BY new.entry
          LIMIT %(max_rows)s
     ) AS d
)
SELECT key, bool_or(waits AND cause <> 'blocked') AS has_head, bool_or(NOT waits) AS has_ended,
       min(seq) FILTER (WHERE waits) AS seq, min(due_at) FILTER (WHERE waits) AS due_at,
       min(created_at) FILTER (WHERE waits) AS created_at, lane, NULL::bigint AS top, NULL::bigint AS cut
  FROM (
      SELECT DISTINCT ON (id) lane, seq, cause, due_at, created_at, cause <> 'settled' AS waits, above,
             CASE WHEN cause NOT IN ('scheduled', 'aside', 'replayed') THEN key END AS key
        FROM portion
       ORDER BY id, run DESC, (cause = 'settled') DESC, entry DESC
  ) AS last
 WHERE waits OR above >= 0 AND key IS NOT NULL
 GROUP BY lane, key
 UNION ALL
SELECT NULL, max(entry) > min(drawn), NULL, NULL, NULL, NULL, lane, max(seq),
       CASE WHEN count(*) >= %(max_rows)s OR max(entry) > min(drawn) THEN max(entry) END
  FROM portion, (SELECT coalesce(pg_sequence_last_value('outbox.deferral_entry_seq'::regclass), 0)) AS last (drawn)
 GROUP BY lane
