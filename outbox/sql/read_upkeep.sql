-- Does:  Read when the upkeep last succeeded, whatever drives it.
-- Takes: nothing
-- Gives: succeeded_at (null: never), awaited_at (null: nobody knows), now
-- Index: none
SELECT u.succeeded_at, u.awaited_at, now()
  FROM (SELECT) AS always LEFT JOIN outbox.upkeep u ON true
