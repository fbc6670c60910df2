-- Does:  Lock free lanes for this session, up to a number.
-- Takes: class, lanes (int4[], tried in this order), wanted
-- Gives: lane, one row per lane that is now held
-- Index: none
SELECT offered.lane
  FROM unnest(%(lanes)s::int[]) AS offered (lane)
 -- Evaluated row by row until LIMIT is reached: no lane is locked but not returned.
 WHERE pg_catalog.pg_try_advisory_lock(%(class)s::int, offered.lane)
 LIMIT %(wanted)s
