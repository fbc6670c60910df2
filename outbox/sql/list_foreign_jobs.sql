-- Does:  List the pg_cron jobs that look like pillarbox's, but don't maintain this database, among those that this role sees.
-- Takes: roles (those of this database's jobs), heeds_nodes (jobs connect to their node and port)
-- Gives: jobid, name, role, database, node, port, active, is_here (of this database), exists (its database), is_this_server
-- Index: none
SELECT j.jobid, j.jobname::text, j.username, j.database, j.nodename, j.nodeport, j.active,
       j.database = current_database(), d.oid IS NOT NULL, node.is_this
  FROM cron.job j
  LEFT JOIN pg_database d ON d.datname = j.database
 CROSS JOIN LATERAL (
       SELECT NOT %(heeds_nodes)s OR j.nodeport = current_setting('port')::int
              AND (j.nodename IN ('', 'localhost', '127.0.0.1', '::1') OR j.nodename LIKE '/%%')) AS node (is_this)
 WHERE (j.jobname LIKE 'pillarbox %%' OR j.command LIKE '%%outbox.maintain(%%')
   AND NOT (node.is_this AND j.database = current_database()
            AND (j.username = ANY (%(roles)s) OR j.jobname NOT LIKE 'pillarbox %%'))
   -- What the hint of pillarbox migrate creates for another database.
   AND NOT (node.is_this AND d.oid IS NOT NULL AND j.jobname = ('pillarbox maintain ' || j.database)::name)
 ORDER BY j.jobid
