-- Does:  Find the waiting messages of blocked keys, each key in order of seq.
-- Takes: reader, lanes, keys, seqs (above which to look; same length), since (created_at of the oldest waiting message), max_rows
-- Gives: lane, seq, id, created_at, run, attempts, entry, cause, key, due_at (null: waits only for its key), now; in the order of keys
-- Index: deferral_key_idx and deferral_message_idx on each partition from since on
SELECT waiting.*
  FROM unnest(%(lanes)s::smallint[], %(keys)s::text[], %(seqs)s::bigint[])
       AS wanted (lane, key, seq)
 CROSS JOIN LATERAL (
     SELECT d.lane, d.seq, d.id, d.created_at, d.run, d.attempts, d.entry, d.cause, d.key, d.due_at, now()
       FROM outbox.deferral AS d
      WHERE d.reader = %(reader)s
        AND d.lane = wanted.lane
        AND d.key = wanted.key
        AND d.seq > wanted.seq
        AND d.cause IN ('refused', 'postponed', 'blocked', 'unknown', 'open', 'found')
        AND d.created_at >= %(since)s
        -- Not a join, which may read the whole log.
        AND (SELECT true
               FROM outbox.deferral AS later
              WHERE later.id = d.id
                AND later.created_at = d.created_at
                AND later.created_at >= %(since)s
                AND (later.reader = %(reader)s) IS TRUE
                AND (later.run > d.run
                     OR later.run = d.run AND (later.entry > d.entry OR later.cause = 'settled'))
              LIMIT 1) IS NULL
      ORDER BY d.seq
      LIMIT %(max_rows)s
 ) AS waiting
 LIMIT %(max_rows)s
