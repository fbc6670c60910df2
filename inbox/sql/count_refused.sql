-- Does:  Count the deliveries that a consumer gave back and that wait for their next attempt.
-- Takes: nothing
-- Gives: keys (that they block, each for its consumer), without_key (deliveries that block none)
-- Index: delivery_waiting_idx
SELECT count(DISTINCT (consumer, key)) FILTER (WHERE key IS NOT NULL) AS keys,
       count(*) FILTER (WHERE key IS NULL) AS without_key
  FROM inbox.delivery
 WHERE attempts > 0
   AND available_at IS NOT NULL
   AND acked_at IS NULL
