-- Does:  Count the dead letters and measure the age of the oldest one, for metrics.
-- Takes: nothing
-- Gives: origin, status, letters, seconds
-- Index: none, reads the whole table
SELECT origin, status, count(*) AS letters,
       CAST(extract(epoch FROM now() - min(created_at)) AS float8) AS seconds
  FROM {schema}.dead_letter
 GROUP BY origin, status
