-- Does:  Read the database's clock, the last assigned seq and entry, a new transaction id, and the id of the cluster.
-- Takes: nothing
-- Gives: one row: now, seq, entry, transaction_id, cluster
-- Index: none
SELECT clock_timestamp() AS now,
       -- last_value is 1 also if the sequence was never used.
       s.last_value - (NOT s.is_called)::int AS seq,
       e.last_value - (NOT e.is_called)::int AS entry,
       -- Assigned after the sequences were read.
       pg_catalog.pg_current_xact_id()::text::bigint AS transaction_id,
       outbox.cluster() AS cluster
  FROM inbox.delivery_seq AS s
 CROSS JOIN inbox.redelivery_entry_seq AS e
