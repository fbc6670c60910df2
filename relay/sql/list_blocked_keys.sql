-- Does:  Find the keys whose head was nacked and waits: their later messages must wait too.
-- Takes: lanes
-- Gives: lane, key
-- Index: message_blocked_idx
SELECT DISTINCT lane, key
  FROM outbox.message
 WHERE lane = ANY (%(lanes)s::smallint[])
   AND key IS NOT NULL
   AND attempts > 0
   AND available_at IS NOT NULL
   AND published_at IS NULL
   AND dead_lettered_at IS NULL
