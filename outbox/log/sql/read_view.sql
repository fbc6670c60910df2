-- Does:  Read the snapshot of the transaction, the next transaction id, and then the last number drawn from the sequence.
-- Takes: nothing
-- Gives: view (xmin:xmax:xip_list/age/seq/file, the age counted from xmin, the last seq drawn, the file of the sequence)
-- Index: none
SELECT concat_ws('/', pg_catalog.pg_current_snapshot()::text,
                 pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid),
                 -- First lock the sequence, so that its file is the current one.
                 coalesce(pg_catalog.pg_sequence_last_value('outbox.message_seq'::pg_catalog.regclass), -1),
                 pg_catalog.pg_relation_filenode('outbox.message_seq'::pg_catalog.regclass))
