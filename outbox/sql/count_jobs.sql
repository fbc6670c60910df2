-- Does:  Count the jobs that have not ended, by consumer, up to a number.
-- Takes: most
-- Gives: consumer, queued, running, cancelling, abandoned (running or cancelling, but the lease ran out), is_complete (there are no more jobs)
-- Index: job_open_idx
WITH open AS MATERIALIZED (
    SELECT j.consumer, j.state, j.lease_until
      FROM inbox.job AS j
     WHERE j.finished_at IS NULL
     LIMIT %(most)s + 1
)
SELECT o.consumer,
       count(*) FILTER (WHERE o.state = 'queued') AS queued,
       count(*) FILTER (WHERE o.state = 'in_progress') AS running,
       count(*) FILTER (WHERE o.state = 'waiting') AS cancelling,
       count(*) FILTER (WHERE o.state <> 'queued' AND o.lease_until < now()) AS abandoned,
       sum(count(*)) OVER () <= %(most)s AS is_complete
  FROM open AS o
 GROUP BY o.consumer
 ORDER BY o.consumer
