-- Does:  Read a pg_cron job of this role for this database, with its last runs.
-- Takes: command (how it begins)
-- Gives: jobid, active, succeeded_at, has_run, now, last failure, is_failing (its last run failed)
-- Index: none
-- In the order of runid: a run that could not connect has no times.
SELECT j.jobid, j.active, max(d.end_time) FILTER (WHERE d.status = 'succeeded'),
       count(d.*) > 0, now(),
       (array_agg(d.return_message ORDER BY d.runid DESC) FILTER (WHERE d.status = 'failed'))[1],
       coalesce((array_agg(d.status ORDER BY d.runid DESC) FILTER (WHERE d.status IN ('succeeded', 'failed')))[1] = 'failed', false)
  FROM cron.job j LEFT JOIN cron.job_run_details d USING (jobid)
 WHERE starts_with(j.command, %(command)s) AND j.username = current_user
   AND j.database = current_database()
 GROUP BY j.jobid, j.active
 ORDER BY j.active DESC, j.jobid
