-- Does:  List messages that were refused and wait for their next attempt, oldest first, and count them up to a number of each reader and day.
-- Takes: max_rows, most (that are counted)
-- Gives: the fields of pillarbox.outbox.observability.measures.failures.Refused; and keys (blocked by those counted, of each reader), without_key (messages that block no key), is_complete (whether all are counted; else these are the oldest of those counted), the same in each row
-- Index: see outbox.open_deferrals; message_pkey for the topics
WITH refused AS MATERIALIZED (
    SELECT d.* FROM outbox.open_deferrals(at_most => %(most)s + 1, only_refused => true) AS d LIMIT %(most)s + 1
), counted AS (
    SELECT count(DISTINCT (d.reader, d.key)) FILTER (WHERE d.key IS NOT NULL) AS keys,
           count(*) FILTER (WHERE d.key IS NULL) AS without_key, count(*) <= %(most)s AS is_complete
      FROM refused AS d
)
SELECT d.key, d.lane, d.id, (SELECT m.topic FROM outbox.message AS m WHERE m.id = d.id AND m.created_at = d.created_at) AS topic,
       d.reader, d.attempts, d.created_at, d.due_at AS available_at,
       (SELECT e.reason FROM outbox.deferral AS e
         WHERE e.id = d.id AND e.created_at = d.created_at AND e.run = d.run AND e.reason IS NOT NULL AND (e.reader = d.reader) IS TRUE
         ORDER BY e.entry DESC LIMIT 1) AS last_error,
       c.keys, c.without_key, c.is_complete
  FROM (SELECT r.* FROM refused AS r ORDER BY r.created_at, r.entry LIMIT %(max_rows)s) AS d
 CROSS JOIN counted AS c
 ORDER BY d.created_at, d.entry
