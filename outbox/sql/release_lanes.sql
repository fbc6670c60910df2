-- Does:  Release lanes.
-- Takes: class, lanes (int4[])
-- Gives: one row: released
-- Index: none
SELECT count(*) FILTER (WHERE pg_catalog.pg_advisory_unlock(%(class)s::int, held.lane))::int AS released
  FROM unnest(%(lanes)s::int[]) AS held (lane)
