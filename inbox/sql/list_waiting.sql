-- Does:  Find what waits in lanes: deliveries that were nacked, and keys with deliveries behind them.
-- Takes: consumer, lanes, after (an entry; only later entries are read), with_blocked
-- Gives: lane, key, seq, created_at, due_in (seconds); all but lane and key are null for a key whose deliveries are only blocked
-- Index: deferral_pkey and deferral_delivery_idx
WITH live AS (
    SELECT e.lane, e.key, e.seq, e.created_at, e.due_at
      FROM inbox.deferral AS e
     WHERE e.consumer = %(consumer)s
       AND e.lane = ANY (%(lanes)s::smallint[])
       AND e.entry > %(after)s
       AND e.cause <> 'acked'
       AND (e.due_at IS NOT NULL OR %(with_blocked)s)
       -- The last entry of each, if none says that it was acked.
       AND (SELECT bool_or(later.cause = 'acked' OR later.entry > e.entry)
              FROM inbox.deferral AS later
             WHERE later.seq = e.seq
               AND later.created_at = e.created_at
               AND (later.consumer = e.consumer) IS TRUE) IS NOT TRUE
)
SELECT lane, key, seq, created_at, extract(epoch FROM due_at - clock_timestamp())::float8 AS due_in
  FROM live
 WHERE due_at IS NOT NULL
 UNION ALL
SELECT DISTINCT lane, key, NULL::bigint, NULL::timestamptz, NULL::float8
  FROM live
 WHERE due_at IS NULL
