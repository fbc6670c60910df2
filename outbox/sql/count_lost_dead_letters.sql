-- Does:  Count the inbox's PENDING dead letters whose receipts may have been dropped.
-- Takes: nothing
-- Gives: count, age of the oldest message in days
-- Index: dead_letter_status_idx, dropped_partition_pkey
SELECT count(*), ceil(extract(epoch FROM now() - min(x.message_at)) / 86400)::int
  FROM (SELECT CASE WHEN d.message_id ~ '^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}$'
                    THEN inbox.moment_of(d.message_id::uuid) END AS message_at
          FROM inbox.dead_letter d WHERE d.status = 'PENDING') AS x
 WHERE x.message_at < (SELECT min(r.starts_at) FROM outbox.partitions('inbox.receipt') r)
    OR EXISTS (SELECT FROM outbox.dropped_partition p
                WHERE p.parent_table = 'inbox.receipt' AND x.message_at BETWEEN p.starts_at AND p.newest)
