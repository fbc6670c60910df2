-- Does:  Read the snapshot of the transaction, the next transaction id, and afterwards what the sequence has drawn.
-- Takes: nothing
-- Gives: view (xmin:xmax:xip_list/age/seq/file, the age counted from xmin, the last seq drawn, the file of the sequence)
-- Index: none
SELECT concat_ws('/', pg_catalog.pg_current_snapshot()::text,
                 pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid),
                 -- First the lock of the sequence, which makes its present file known.
                 coalesce(pg_catalog.pg_sequence_last_value('outbox.message_seq'::pg_catalog.regclass), -1),
                 pg_catalog.pg_relation_filenode('outbox.message_seq'::pg_catalog.regclass))
