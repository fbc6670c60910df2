-- Does:  List the pg_cron jobs that look like pillarbox's, but don't maintain this database, among those that this role sees.
-- Takes: roles (those of this database's jobs), heeds_nodes (jobs connect to their node and port)
-- Gives: jobid, what it is, database, why it is listed, is_dead (it can only fail), is_replaced (by pillarbox migrate)
-- Index: none
SELECT j.jobid,
       format('the job %%L of %%s is for the database %%s at %%s:%%s', j.jobname, j.username, j.database, j.nodename, j.nodeport)
       || CASE WHEN j.active THEN '' ELSE ' (inactive)' END,
       j.database,
       CASE WHEN NOT node.is_this THEN ', which isn''t this server: it was restored from there, or the port was changed'
            WHEN d.oid IS NULL THEN ', but there is no such database: it was renamed, or the job came with a dump'
            WHEN here.is_it THEN ': it maintains that database, as a role of its own'
            ELSE ': it maintains that database, not this one' END,
       node.is_this AND d.oid IS NULL,
       j.username = ANY (%(roles)s) AND CASE WHEN node.is_this THEN d.oid IS NULL ELSE here.is_it END
  FROM cron.job j
  LEFT JOIN pg_database d ON d.datname = j.database
 CROSS JOIN LATERAL (
       SELECT NOT %(heeds_nodes)s OR j.nodeport = current_setting('port')::int
              AND (j.nodename IN ('', 'localhost', '127.0.0.1', '::1') OR j.nodename LIKE '/%%')) AS node (is_this)
 CROSS JOIN LATERAL (SELECT j.database = current_database()) AS here (is_it)
 WHERE (j.jobname LIKE 'pillarbox %%' OR j.command LIKE '%%outbox.maintain(%%')
   AND NOT (node.is_this AND here.is_it AND (j.username = ANY (%(roles)s) OR j.jobname NOT LIKE 'pillarbox %%'))
   -- What the hint of pillarbox migrate creates for another database.
   AND NOT (node.is_this AND d.oid IS NOT NULL AND j.jobname = ('pillarbox maintain ' || j.database)::name)
 ORDER BY j.jobid
