-- Does:  Note a partition before its detach, so that it is found afterwards whatever happens.
-- Takes: partition, parent_table, starts_at, ends_at
-- Gives: nothing
-- Index: retiring_partition_pkey
INSERT INTO outbox.retiring_partition (partition, parent_table, starts_at, ends_at)
VALUES (%(partition)s, %(parent_table)s, %(starts_at)s, %(ends_at)s)
ON CONFLICT DO NOTHING
