-- Does:  Find PENDING dead letters of the inbox whose receipts may have been dropped, among the oldest 10,000.
-- Takes: nothing
-- Gives: severity, finding, remedy
-- Index: dead_letter_status_idx, dropped_partition_pkey
SELECT 'warning',
       format('%%s%%s dead letter%%s of the inbox older than the receipts: a retry can''t tell whether the message was already handled',
              CASE WHEN count(*) = 10000 THEN 'at least ' ELSE '' END, to_char(count(*), 'FM999,999,999,999'), CASE WHEN count(*) > 1 THEN 's' END),
       format('pillarbox retention set inbox.receipt %%sd  # for future ones; handle the oldest PENDING ones in inbox.dead_letter manually, and discard them',
              ceil(extract(epoch FROM now() - min(x.message_at)) / 86400)::int)
  FROM (SELECT CASE WHEN d.message_id ~ '^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}$'
                    THEN inbox.moment_of(d.message_id::uuid) END AS message_at
          FROM inbox.dead_letter d WHERE d.status = 'PENDING' ORDER BY d.created_at LIMIT 10000) AS x
 WHERE x.message_at < (SELECT min(r.starts_at) FROM outbox.partitions('inbox.receipt') r)
    OR EXISTS (SELECT FROM outbox.dropped_partition p
                WHERE p.parent_table = 'inbox.receipt' AND x.message_at BETWEEN p.starts_at AND p.newest)
HAVING count(*) > 0
