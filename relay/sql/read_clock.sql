-- Does:  Read the database's clock, the last place in the order that was given out, and a new transaction id.
-- Takes: nothing
-- Gives: one row: now, seq, transaction_id
-- Index: none
SELECT clock_timestamp() AS now,
       -- A sequence that was never used says 1, too.
       last_value - (NOT is_called)::int AS seq,
       pg_catalog.pg_current_xact_id()::text::bigint AS transaction_id
  FROM outbox.message_seq
