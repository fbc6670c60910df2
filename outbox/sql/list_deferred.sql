-- Does:  List the latest entry of the latest run of messages that wait for relays after their first claim, the oldest first, up to a number.
-- Takes: most
-- Gives: id, created_at, lane, cause, due_at
-- Index: none, reads the log but no messages
SELECT id, created_at, lane, cause, due_at
  FROM (SELECT DISTINCT ON (e.id, e.created_at, e.reader)
               e.id, e.created_at, e.lane, e.cause, e.due_at, e.reader
          FROM outbox.deferral AS e
         ORDER BY e.id, e.created_at, e.reader, e.run DESC, e.cause = 'settled' DESC, e.entry DESC) AS latest
 WHERE cause <> 'settled'
   AND EXISTS (SELECT FROM outbox.subscription AS s WHERE s.reader = latest.reader AND s.ended_at IS NULL)
   AND latest.reader <> ALL (ARRAY(SELECT r.reader FROM outbox.reader AS r WHERE r.broker = 'direct'))
 LIMIT %(most)s + 1
