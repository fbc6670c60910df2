-- Does:  List messages that were nacked and wait for their next attempt, oldest first.
-- Takes: max_rows
-- Gives: the fields of outbox.cli.sides.Blocked, except consumer
-- Index: see outbox.open_deferrals; message_pkey for the topics
SELECT d.key, d.lane, d.id, (SELECT m.topic FROM outbox.message AS m WHERE m.id = d.id AND m.created_at = d.created_at) AS topic,
       d.reader, d.attempts, d.created_at, d.due_at AS available_at,
       (SELECT e.reason FROM outbox.deferral AS e
         WHERE e.id = d.id AND e.created_at = d.created_at AND e.run = d.run AND e.reason IS NOT NULL AND (e.reader = d.reader) IS TRUE
         ORDER BY e.entry DESC LIMIT 1) AS last_error
  FROM outbox.open_deferrals(only_refused => true) AS d
 ORDER BY d.created_at
 LIMIT %(max_rows)s
