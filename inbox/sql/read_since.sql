-- Does:  Read where a consumer begins before it has stored a position: at its oldest subscription.
-- Takes: consumer
-- Gives: since_seq, xmin (every transaction with a lower id had ended then); no row without a subscription
-- Index: subscription_pkey
SELECT min(s.since_seq), min(pg_snapshot_xmin(s.since)::text::bigint)
  FROM inbox.subscription AS s
 WHERE s.consumer = %(consumer)s
HAVING count(*) > 0
