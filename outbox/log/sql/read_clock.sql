-- Does:  Read the database's clock, the last numbers drawn, and the base of this cluster.
-- Takes: nothing
-- Gives: one row: now, seq, entry, entry_file (of the sequence), changed (a sequence that was altered; null: none), base (null: pillarbox migrate has not run in this cluster)
-- Index: base_pkey
SELECT clock_timestamp() AS now,
       -- Their relations can be without a row while one of them is restarted.
       coalesce(pg_sequence_last_value('outbox.message_seq'::regclass), 0) AS seq,
       coalesce(pg_sequence_last_value('outbox.deferral_entry_seq'::regclass), 0) AS entry,
       pg_relation_filenode('outbox.deferral_entry_seq'::regclass) AS entry_file,
       (SELECT min(s.seqrelid::regclass::text)
          FROM pg_sequence AS s
         WHERE s.seqrelid IN ('outbox.message_seq'::regclass, 'outbox.deferral_entry_seq'::regclass)
           AND (s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcache, s.seqcycle)
               <> (1, 1, 1, 9223372036854775807, 1, false)) AS changed,
       -- This must be the cluster for which the tables were last migrated.
       (SELECT b.seq FROM outbox.base AS b
         WHERE b.cluster = split_part(outbox.cluster(), '/', 1)
           AND b.seq > ALL (SELECT other.seq FROM outbox.base AS other WHERE other.cluster <> b.cluster)) AS base
