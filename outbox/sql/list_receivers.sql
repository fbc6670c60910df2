-- Does:  List the readers that get messages: neither dropped ones, nor those that discard them.
-- Takes: nothing
-- Gives: reader, broker ('direct': a consumer that reads the outbox; null until its first relay has recorded it)
-- Index: none, reads the few readers
SELECT r.reader, r.broker
  FROM outbox.reader AS r
 WHERE EXISTS (SELECT FROM outbox.subscription AS s WHERE s.reader = r.reader AND s.ended_at IS NULL AND NOT s.is_discarded)
 ORDER BY r.created_at, r.reader
