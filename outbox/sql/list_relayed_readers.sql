-- Does:  List the readers whose messages relays publish, and where: neither dropped ones, nor those that discard, nor those that a consumer reads directly.
-- Takes: nothing
-- Gives: reader, broker (null until its first relay has recorded it)
-- Index: none, reads the few readers
SELECT r.reader, r.broker
  FROM outbox.reader AS r
 WHERE r.broker IS DISTINCT FROM 'direct'
   AND EXISTS (SELECT FROM outbox.subscription AS s WHERE s.reader = r.reader AND s.ended_at IS NULL AND NOT s.is_discarded)
 ORDER BY r.created_at, r.reader
