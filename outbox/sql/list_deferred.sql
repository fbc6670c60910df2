-- Does:  List the latest entry of the latest run of messages that wait after their first claim, the oldest first, up to a number.
-- Takes: most
-- Gives: id, created_at, seq, lane, run, cause, due_at
-- Index: none, reads the log but no messages
SELECT id, created_at, seq, lane, run, cause, due_at
  FROM (SELECT DISTINCT ON (e.id, e.created_at)
               e.id, e.created_at, e.seq, e.lane, e.run, e.cause, e.due_at
          FROM outbox.deferral AS e
         ORDER BY e.id, e.created_at, e.run DESC, e.cause = 'settled' DESC, e.entry DESC) AS latest
 WHERE cause <> 'settled'
 LIMIT %(most)s + 1
