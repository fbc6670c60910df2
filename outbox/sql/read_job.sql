-- Does:  Read one of pillarbox's pg_cron jobs with its last runs, as its role, which sees only its own.
-- Takes: job (its name)
-- Gives: jobid, active, succeeded_at, has_run, failure (the last one), is_failing (its last run failed), now; no row if it doesn't exist
-- Index: none
-- In the order of runid: a run that could not connect has no times.
SELECT j.jobid, j.active, d.*, now()
  FROM cron.job j
 CROSS JOIN LATERAL (
       SELECT max(r.end_time) FILTER (WHERE r.status = 'succeeded'), count(*) > 0,
              (array_agg(r.return_message ORDER BY r.runid DESC) FILTER (WHERE r.status = 'failed'))[1],
              coalesce((array_agg(r.status ORDER BY r.runid DESC) FILTER (WHERE r.status IN ('succeeded', 'failed')))[1] = 'failed', false)
         FROM cron.job_run_details r WHERE r.jobid = j.jobid) d
 WHERE j.jobname = %(job)s AND j.username = current_user AND j.database = current_database()
