-- Owner part, run in every migration without pg_partman: outbox.make_partition() creates the partitions from
-- now on. pg_partman's rows about pillarbox's tables stay, switched off.

DROP FUNCTION IF EXISTS outbox.make_with_partman(text, timestamptz[]);
