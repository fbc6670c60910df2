-- Does:  Count the deliveries that a consumer gave back and that wait for their next attempt.
-- Takes: nothing
-- Gives: keys (that they block, each for its consumer), without_key (deliveries that block none)
-- Index: none, reads the log
SELECT count(DISTINCT (consumer, key)) FILTER (WHERE key IS NOT NULL) AS keys,
       count(*) FILTER (WHERE key IS NULL) AS without_key
  FROM inbox.waiting_delivery
 WHERE attempts > 0
   AND state = 'waiting'
