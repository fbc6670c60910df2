-- Does:  Measure from receipts how many recently added messages each consumer has handled, and how soon.
-- Takes: since, until (moments), most (receipts)
-- Gives: consumer, handled (a second), median, slow (the 95th percentile)
-- Index: receipt_pkey, the latest messages
WITH receipt AS MATERIALIZED (
    SELECT r.consumer, r.message_at, greatest(r.received_at - r.message_at, interval '0') AS waited
      FROM inbox.receipt AS r
     WHERE r.message_id >= (lpad(to_hex((extract(epoch FROM %(since)s::timestamptz) * 1000)::bigint), 12, '0') || '70008000000000000000')::uuid
       AND r.message_at >= %(since)s::timestamptz - interval '1 ms'
     ORDER BY r.message_id DESC
     LIMIT %(most)s
), span AS (
    SELECT CASE WHEN count(*) = %(most)s THEN greatest(extract(epoch FROM %(until)s::timestamptz - min(r.message_at)), 0.001)
                ELSE extract(epoch FROM %(until)s::timestamptz - %(since)s::timestamptz) END AS seconds
      FROM receipt AS r
)
SELECT r.consumer, (count(*) / min(s.seconds))::float8 AS handled,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY r.waited) AS median,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY r.waited) AS slow
  FROM receipt AS r
 CROSS JOIN span AS s
 GROUP BY r.consumer
 ORDER BY r.consumer
