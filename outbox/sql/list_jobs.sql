-- Does:  List the pg_cron jobs that are pillarbox's or look like it, with their last runs, among those that this role sees.
-- Takes: roles (those of this database's jobs), heeds_nodes (jobs connect to their node and port)
-- Gives: jobid, task (null: of another database), foreign (what it is, if pillarbox migrate didn't schedule it here), remedy (for that), active, succeeded_at, has_run, failure (the last one), is_failing (its last run failed), now
-- Index: none
-- In the order of runid: a run that could not connect has no times.
SELECT j.jobid,
       CASE WHEN j.database = current_database() AND j.username = ANY (%(roles)s)
            THEN substring(j.command FROM '^(CALL outbox.maintain|SELECT outbox.schedule_detaches)\(') END,
       CASE WHEN NOT (j.database = current_database()
                      AND (j.username = ANY (%(roles)s) OR j.jobname NOT LIKE 'pillarbox %%')
                      AND (NOT %(heeds_nodes)s OR j.nodeport = current_setting('port')::int
                                                  AND (j.nodename IN ('', 'localhost', '127.0.0.1', '::1') OR j.nodename LIKE '/%%')))
            THEN format('the job %%L of %%s is for the database %%s at %%s:%%s%%s: it isn''t one of those that pillarbox migrate schedules here',
                        j.jobname, j.username, j.database, j.nodename, j.nodeport, CASE WHEN NOT j.active THEN ' (inactive)' END) END,
       format('SET ROLE %%I; SELECT cron.unschedule(%%s); RESET ROLE;  -- unless you want the job', j.username, j.jobid),
       j.active, d.*, now()
  FROM cron.job j
 CROSS JOIN LATERAL (
       SELECT max(r.end_time) FILTER (WHERE r.status = 'succeeded'), count(*) > 0,
              (array_agg(r.return_message ORDER BY r.runid DESC) FILTER (WHERE r.status = 'failed'))[1],
              coalesce((array_agg(r.status ORDER BY r.runid DESC) FILTER (WHERE r.status IN ('succeeded', 'failed')))[1] = 'failed', false)
         FROM cron.job_run_details r WHERE r.jobid = j.jobid) d
 WHERE j.jobname LIKE 'pillarbox %%' OR j.command LIKE '%%outbox.maintain(%%'
 ORDER BY j.active DESC, j.jobid
