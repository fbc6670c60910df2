-- Does:  List the consumers that read the outbox, and get messages.
-- Takes: nothing
-- Gives: consumer
-- Index: none, reads the few readers
SELECT r.reader AS consumer
  FROM outbox.reader AS r
 WHERE r.broker = 'direct'
   AND EXISTS (SELECT FROM outbox.subscription AS s WHERE s.reader = r.reader AND s.ended_at IS NULL AND NOT s.is_discarded)
