-- Does:  List the limits of outbox.message that don't exist, or aren't validated.
-- Takes: limits (names of the constraints)
-- Gives: limit, is_gone
-- Index: none
SELECT expected.name, c.oid IS NULL AS is_gone
  FROM unnest(%(limits)s::text[]) AS expected (name)
  LEFT JOIN pg_catalog.pg_constraint AS c
    ON c.conrelid = 'outbox.message'::regclass AND c.conname = expected.name
 WHERE c.oid IS NULL OR NOT c.convalidated
 ORDER BY expected.name
