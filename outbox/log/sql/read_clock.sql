-- Does:  Read the database's clock, the last numbers drawn, and the base of this cluster.
-- Takes: nothing
-- Gives: one row: now, seq, entry, base (null: pillarbox migrate has not run in this cluster)
-- Index: base_pkey
SELECT clock_timestamp() AS now,
       -- last_value is 1 also if the sequence was never used.
       message_seq.last_value - (NOT message_seq.is_called)::int AS seq,
       deferral_entry_seq.last_value - (NOT deferral_entry_seq.is_called)::int AS entry,
       -- The last cluster in which the tables have lived must be this one.
       (SELECT b.seq FROM outbox.base AS b
         WHERE b.cluster = split_part(outbox.cluster(), '/', 1)
           AND b.seq > ALL (SELECT other.seq FROM outbox.base AS other WHERE other.cluster <> b.cluster)) AS base
  FROM outbox.message_seq, outbox.deferral_entry_seq
