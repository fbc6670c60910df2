-- Does:  Find the dead letters whose id begins with some digits.
-- Takes: first and last (the least and the greatest id that does), max_rows
-- Gives: id
-- Index: dead_letter_pkey, in each partition
SELECT id
  FROM {schema}.dead_letter
 WHERE id BETWEEN CAST(%(first)s AS uuid) AND CAST(%(last)s AS uuid)
 ORDER BY id
 LIMIT CAST(%(max_rows)s AS bigint)
