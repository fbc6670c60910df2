-- Does:  Find the deliveries with a key that were given back and wait: later ones of the key must wait too.
-- Takes: consumer, lanes
-- Gives: lane, seq, key
-- Index: delivery_waiting_idx
SELECT lane, seq, key
  FROM inbox.delivery
 WHERE consumer = %(consumer)s
   AND lane = ANY (%(lanes)s::smallint[])
   AND key IS NOT NULL
   AND available_at IS NOT NULL
   AND acked_at IS NULL
