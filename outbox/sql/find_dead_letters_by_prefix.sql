-- Does:  Find the dead letters whose id has a prefix, and those of a message.
-- Takes: first and last (the smallest and the greatest id with the prefix), message_id (null: none), max_rows
-- Gives: id
-- Index: dead_letter_pkey and dead_letter_message_idx, in each partition
SELECT id
  FROM {schema}.dead_letter
 WHERE id BETWEEN CAST(%(first)s AS uuid) AND CAST(%(last)s AS uuid)
    OR message_id = CAST(%(message_id)s AS text)
 ORDER BY id
 LIMIT CAST(%(max_rows)s AS bigint)
