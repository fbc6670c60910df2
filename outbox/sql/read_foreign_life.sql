-- Does:  Read what is known about a message of another producer, whose id isn't a UUID.
-- Takes: id (as text)
-- Gives: at, step, source, consumer, attempts, due_at, by, reason
-- Index: foreign_receipt_pkey, once for each of its sources; reads all dead letters
WITH RECURSIVE named (source) AS (
    -- Steps from source to source, with one index descent each.
    (SELECT f.source FROM inbox.foreign_receipt AS f ORDER BY f.source LIMIT 1)
     UNION ALL
    SELECT (SELECT f.source FROM inbox.foreign_receipt AS f WHERE f.source > n.source ORDER BY f.source LIMIT 1)
      FROM named AS n
     WHERE n.source IS NOT NULL
)
SELECT f.received_at AS at, 'handled' AS step, 'inbox.foreign_receipt' AS source, f.consumer,
       0 AS attempts, NULL::timestamptz AS due_at, NULL AS by, 'source ' || f.source AS reason
  FROM named AS n
  JOIN inbox.foreign_receipt AS f ON f.source = n.source AND f.message_id = %(id)s::text
 UNION ALL
SELECT d.created_at, 'dead_letter', 'inbox.dead_letter', substring(d.origin FROM '^consumer:(.*)$'),
       d.attempts, CASE WHEN d.status = 'PENDING' THEN d.retry_after END, d.origin, d.error_reason
  FROM inbox.dead_letter_status AS d
 WHERE d.message_id = %(id)s::text
