-- Does:  List the latest entry of messages of readers that wait after their first claim, up to a number of each reader of those refused, blocked, due, and not due.
-- Takes: readers, most
-- Gives: reader, id, created_at, lane, cause, due_at, is_more (whether there are more of this reader)
-- Index: see outbox.open_deferrals; reads the log but no messages
SELECT d.reader, d.id, d.created_at, d.lane, d.cause, d.due_at, d.place > %(most)s AS is_more
  FROM (SELECT e.*, row_number() OVER (PARTITION BY e.reader,
                                       CASE WHEN e.cause IN ('refused', 'postponed') THEN 'refused' WHEN e.cause = 'blocked' THEN 'blocked'
                                            WHEN e.due_at <= now() THEN 'due' END) AS place
          FROM outbox.open_deferrals(%(readers)s::text[], %(most)s + 1) AS e) AS d
 WHERE d.place <= %(most)s + 1
