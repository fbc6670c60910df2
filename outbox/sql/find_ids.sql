-- Does:  Find messages and dead letters whose ids begin in the same way.
-- Takes: first, last (the lowest and the highest of such ids), max_rows
-- Gives: kind (message, outbox or inbox: the side of a dead letter), id, topic, created_at
-- Index: message_pkey, dead_letter_pkey
SELECT kind, id, topic, created_at
  FROM ((SELECT 'message' AS kind, id, topic, created_at FROM outbox.message
          WHERE id BETWEEN %(first)s AND %(last)s LIMIT %(max_rows)s)
         UNION ALL
        (SELECT 'outbox', id, topic, created_at FROM outbox.dead_letter
          WHERE id BETWEEN %(first)s AND %(last)s LIMIT %(max_rows)s)
         UNION ALL
        (SELECT 'inbox', id, topic, created_at FROM inbox.dead_letter
          WHERE id BETWEEN %(first)s AND %(last)s LIMIT %(max_rows)s)) AS found
 ORDER BY created_at DESC
 LIMIT %(max_rows)s
