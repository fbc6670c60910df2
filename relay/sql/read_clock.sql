-- Does:  Read the database's clock, the last assigned seq and entry, and a new transaction id.
-- Takes: nothing
-- Gives: one row: now, seq, entry, transaction_id
-- Index: none
SELECT clock_timestamp() AS now,
       -- last_value is 1 also if the sequence was never used.
       message_seq.last_value - (NOT message_seq.is_called)::int AS seq,
       deferral_entry_seq.last_value - (NOT deferral_entry_seq.is_called)::int AS entry,
       pg_catalog.pg_current_xact_id()::text::bigint AS transaction_id
  FROM outbox.message_seq, outbox.deferral_entry_seq
