-- Does:  Read the database's clock, and the last place in the order that was given out.
-- Takes: nothing
-- Gives: one row: now, seq
-- Index: none
-- A sequence that was never used says 1, too.
SELECT clock_timestamp() AS now, last_value - (NOT is_called)::int AS seq
  FROM outbox.message_seq
