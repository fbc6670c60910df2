-- Does:  Count the deliveries that consumers nacked and that wait for their next attempt.
-- Takes: nothing
-- Gives: keys (blocked by them, counted for each consumer), without_key (deliveries that block no key)
-- Index: none, reads the log
SELECT count(DISTINCT (consumer, key)) FILTER (WHERE key IS NOT NULL) AS keys,
       count(*) FILTER (WHERE key IS NULL) AS without_key
  FROM inbox.waiting_delivery
 WHERE attempts > 0
   AND state = 'waiting'
