-- Does:  Read the database's clock, the last seq that was assigned, and a new transaction id.
-- Takes: nothing
-- Gives: one row: now, seq, transaction_id
-- Index: none
SELECT clock_timestamp() AS now,
       -- last_value is 1 also if the sequence was never used.
       last_value - (NOT is_called)::int AS seq,
       pg_catalog.pg_current_xact_id()::text::bigint AS transaction_id
  FROM outbox.message_seq
