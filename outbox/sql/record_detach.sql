-- Does:  Record a partition before pillarbox maintain detaches it, so that it is never lost.
-- Takes: partition, parent_table, starts_at, ends_at
-- Gives: nothing
-- Index: retiring_partition_pkey
INSERT INTO outbox.retiring_partition (partition, parent_table, starts_at, ends_at, detach_by)
VALUES (%(partition)s, %(parent_table)s, %(starts_at)s, %(ends_at)s, 'pillarbox maintain')
ON CONFLICT (partition) DO NOTHING
