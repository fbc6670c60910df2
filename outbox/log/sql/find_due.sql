-- Does:  Find messages that are due now or within a time: scheduled ones, retries and replays.
-- Takes: reader, lanes, moments and entries (how far the previous search got; same length), since (created_at of the oldest waiting message), within (an interval), max_rows (for each lane)
-- Gives: lane, seq, id, created_at, run, attempts, entry, cause (of a scheduled message that is due, see outbox.due_cause), key, due_at (all null but lane if it has none), now
-- Index: deferral_due_idx and deferral_message_idx on each partition from since on
SELECT leased.lane, due.seq, due.id, due.created_at, due.run, due.attempts, due.entry,
       CASE WHEN due.cause = 'scheduled' AND due.due_at <= now() THEN outbox.due_cause(due.id, due.created_at, due.cause) ELSE due.cause END AS cause,
       due.key, due.due_at, now()
  FROM unnest(%(lanes)s::smallint[], %(moments)s::timestamptz[], %(entries)s::bigint[]) AS leased (lane, due_at, entry)
  -- Lane by lane, so that waiting rows of other lanes are not read.
  LEFT JOIN LATERAL (
      SELECT d.due_at, d.seq, d.id, d.created_at, d.run, d.attempts, d.entry, d.cause, d.key
        FROM outbox.deferral AS d
       WHERE d.reader = %(reader)s
         AND d.lane = leased.lane
         AND (d.due_at, d.entry) > (leased.due_at, leased.entry)
         -- Not clock_timestamp(), which is volatile: it would scan the index to its end.
         AND d.due_at <= now() + %(within)s
         AND d.created_at >= %(since)s
         -- Not a join, which may read the whole log. With a later entry, the message no longer waits, or for another reason.
         AND (SELECT true
                FROM outbox.deferral AS later
               WHERE later.id = d.id
                 AND later.created_at = d.created_at
                 AND later.created_at >= %(since)s
                AND (later.reader = %(reader)s) IS TRUE
                 AND (later.run > d.run
                      OR later.run = d.run AND (later.entry > d.entry OR later.cause = 'settled'))
               LIMIT 1) IS NULL
       ORDER BY d.due_at, d.entry
       LIMIT %(max_rows)s
  ) AS due ON true
