-- Does:  Count dead letters by reason and origin, the most frequent first.
-- Takes: as select_dead_letters.sql; max_rows (null: all)
-- Gives: reason (its first 80 characters), origin, topics, a topic, letters, oldest, newest, letters of all groups, groups
-- Index: as select_dead_letters.sql
SELECT reason, origin, count(*) AS topics, min(topic) AS topic,
       CAST(sum(letters) AS bigint) AS letters, min(oldest) AS oldest, max(newest) AS newest,
       CAST(sum(sum(letters)) OVER () AS bigint) AS total, count(*) OVER () AS groups
  FROM (
       -- Grouped by topic first: counting distinct topics would sort all dead letters.
       SELECT left(error_reason, 80) AS reason, origin, topic,
              count(*) AS letters, min(created_at) AS oldest, max(created_at) AS newest
         FROM (
{selected}
              ) AS selected
        GROUP BY 1, 2, 3
       ) AS of_topic
 GROUP BY 1, 2
 ORDER BY letters DESC, newest DESC, 1, 2
 LIMIT CAST(%(max_rows)s AS bigint)
