-- Does:  Find the dead letters whose id has a prefix.
-- Takes: first and last (the smallest and the greatest id with the prefix), max_rows
-- Gives: id
-- Index: dead_letter_pkey, in each partition
SELECT id
  FROM {schema}.dead_letter
 WHERE id BETWEEN CAST(%(first)s AS uuid) AND CAST(%(last)s AS uuid)
 ORDER BY id
 LIMIT CAST(%(max_rows)s AS bigint)
