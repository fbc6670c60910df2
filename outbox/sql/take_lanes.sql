-- Does:  Lock free lanes for this session, at most as many as wanted.
-- Takes: class, lanes (int4[], tried in this order), wanted
-- Gives: the lanes now held: lane
-- Index: none
SELECT offered.lane
  FROM unnest(%(lanes)s::int[]) AS offered (lane)
 -- Evaluated row by row until LIMIT is reached: no lane is locked and then left out.
 WHERE pg_catalog.pg_try_advisory_lock(%(class)s::int, offered.lane)
 LIMIT %(wanted)s
