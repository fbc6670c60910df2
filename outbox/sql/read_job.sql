-- Does:  Read a pg_cron job of this role, with its last runs.
-- Takes: job
-- Gives: jobid, active, succeeded_at, has_run, now, last failure
-- Index: none
SELECT j.jobid, j.active, max(d.end_time) FILTER (WHERE d.status = 'succeeded'),
       count(d.*) > 0, now(),
       (array_agg(d.return_message ORDER BY d.start_time DESC)
           FILTER (WHERE d.status = 'failed'))[1]
  FROM cron.job j LEFT JOIN cron.job_run_details d USING (jobid)
 WHERE j.jobname = %(job)s AND j.username = current_user
   AND j.database = current_database()
 GROUP BY j.jobid, j.active
