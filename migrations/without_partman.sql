-- Owner part, run in every migration without pg_partman: outbox.make_partition() creates the partitions from
-- now on. What pg_partman has recorded of our tables stays, and is switched off.

DROP FUNCTION IF EXISTS outbox.make_with_partman(text, timestamptz[]);
