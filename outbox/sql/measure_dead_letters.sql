-- Does:  Count the dead letters and tell the age of the oldest one, for metrics.
-- Takes: nothing
-- Gives: origin, status, letters, seconds
-- Index: none: it reads what the retention leaves
SELECT origin, status, count(*) AS letters,
       CAST(extract(epoch FROM now() - min(created_at)) AS float8) AS seconds
  FROM {schema}.dead_letter
 GROUP BY origin, status
