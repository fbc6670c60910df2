-- Does:  Count the PENDING dead letters by reason and origin, the newest ones up to a number, and those that are new in a window.
-- Takes: window (an interval), most (letters)
-- Gives: reason (its first 80 characters), origin, pending, new, topics, topic (one of them), age (of the oldest), and of all reasons: counted, age_of_all
-- Index: dead_letter_status_idx
WITH pending AS MATERIALIZED (
    SELECT left(d.error_reason, 80) AS reason, d.origin, d.topic, d.created_at
      FROM {schema}.dead_letter AS d
     WHERE d.status = 'PENDING'
     ORDER BY d.created_at DESC
     LIMIT %(most)s + 1
)
SELECT p.reason, p.origin, count(*) AS pending,
       count(*) FILTER (WHERE p.created_at > now() - %(window)s::interval) AS new,
       count(DISTINCT p.topic) AS topics, min(p.topic) AS topic,
       now() - min(p.created_at) AS age,
       sum(count(*)) OVER ()::bigint AS counted,
       now() - (SELECT d.created_at FROM {schema}.dead_letter AS d WHERE d.status = 'PENDING' ORDER BY d.created_at LIMIT 1) AS age_of_all
  FROM pending AS p
 GROUP BY p.reason, p.origin
 ORDER BY pending DESC, age, p.reason, p.origin
