-- Does:  Make due messages ready: scheduled ones and retries.
-- Takes: lanes, max_rows (of each lane), max_total (of all lanes; the first ones come first)
-- Gives: lane, seq, key, attempts, created_at of each
-- Index: message_waiting_idx to find them, message_pkey to update them
WITH due AS MATERIALIZED (
    SELECT waiting.id, waiting.created_at
      FROM unnest(%(lanes)s::smallint[]) AS leased (lane)
     -- Lane by lane, so that waiting rows of other lanes are not read.
     CROSS JOIN LATERAL (
         SELECT m.id, m.created_at
           FROM outbox.message AS m
          WHERE m.lane = leased.lane
            -- Not clock_timestamp(), which is volatile: it would scan the index to its end.
            AND m.available_at <= now()
            AND m.published_at IS NULL
            AND m.dead_lettered_at IS NULL
          ORDER BY m.available_at
          LIMIT %(max_rows)s
     ) AS waiting
     LIMIT %(max_total)s
)
UPDATE outbox.message AS m
   SET available_at = NULL
 -- Not a join, which may read whole partitions: this touches only those of the rows' days.
 WHERE m.id = ANY (ARRAY(SELECT id FROM due))
   AND m.created_at BETWEEN (SELECT min(created_at) FROM due) AND (SELECT max(created_at) FROM due)
   AND m.published_at IS NULL
   AND m.dead_lettered_at IS NULL
RETURNING m.lane, m.seq, m.key, m.attempts, m.created_at
