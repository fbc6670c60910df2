-- Does:  Record that messages wait, why, and until when.
-- Takes: reader, ids, created_ats, lanes, seqs, runs, attempts, causes, keys, delays (seconds; null unless refused or postponed), reasons (same length), first and last of created_ats
-- Gives: lane, due_at (the earliest in the lane)
-- Index: message_pkey for scheduled messages, on each partition between first and last
WITH added AS (
    INSERT INTO outbox.deferral (reader, id, created_at, lane, seq, run, attempts, cause, key, reason, due_at)
    SELECT %(reader)s, d.id, d.created_at, d.lane, d.seq, d.run, d.attempts, d.cause, d.key, d.reason,
           CASE WHEN d.cause = 'scheduled'
                -- Within the limits of both tables, even if the clock was set back.
                THEN (SELECT least(greatest(coalesce(m.available_at, now()), '0001-01-03 00:00:00+00'), clock_timestamp() + interval '365 days')
                        FROM outbox.message AS m
                       WHERE m.id = d.id
                         AND m.created_at = d.created_at
                         AND m.created_at BETWEEN %(first)s AND %(last)s)
                WHEN d.cause <> 'blocked' THEN clock_timestamp() + make_interval(secs => d.delay) END
      FROM unnest(%(ids)s::uuid[], %(created_ats)s::timestamptz[], %(lanes)s::smallint[], %(seqs)s::bigint[], %(runs)s::integer[],
                  %(attempts)s::integer[], %(causes)s::text[], %(keys)s::text[], %(delays)s::float8[], %(reasons)s::text[])
           AS d (id, created_at, lane, seq, run, attempts, cause, key, delay, reason)
 RETURNING lane, due_at
)
SELECT lane, min(due_at)
  FROM added
 GROUP BY lane
HAVING min(due_at) IS NOT NULL
