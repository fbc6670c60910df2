-- Does:  Find partitions past their retention that are held, that are hours late, or that are detached and have to stay.
-- Takes: nothing
-- Gives: severity, finding, remedy
-- Index: none
SELECT 'warning',
       CASE WHEN p.step = 'attach' AND p.unsettled = 0 THEN
                 format('%%s is detached before the end of its retention, so queries don''t see its rows', p.partition)
            WHEN p.step IN ('hold', 'attach') THEN
                 format('%%s is past its retention and held%%s: %%s', p.partition,
                        CASE p.step WHEN 'attach' THEN ' and detached, so queries don''t see it' END, p.reason)
            ELSE format('%%s should have been dropped hours ago; next step: %%s. The upkeep isn''t running, or a long transaction blocks it',
                        p.partition, p.step) END,
       CASE WHEN p.step NOT IN ('hold', 'attach') THEN
                 'SELECT pid, usename, xact_start, query FROM pg_stat_activity WHERE xact_start < now() - interval ''1 hour'';  -- then: pillarbox maintain'
            WHEN p.unsettled IS NOT NULL THEN p.statement || ';' || CASE WHEN p.unsettled > 0 THEN s.what ELSE '' END
            WHEN c.relowner <> o.relowner THEN format('ALTER TABLE %%s OWNER TO %%s;', p.partition, o.relowner::regrole)
            ELSE format('SELECT coalesce(unsettled, gate) FROM outbox.partition_policy WHERE parent_table = %%L;'
                        '  -- fix the condition or the function, which fails', p.parent_table) END
  FROM outbox.upkeep_plan() p
  JOIN pg_class o ON o.oid = p.parent_table::regclass
  JOIN pg_class c ON c.oid = to_regclass(p.partition)
  LEFT JOIN outbox.retiring_partition r ON r.partition = p.partition
 CROSS JOIN LATERAL (
       SELECT CASE p.parent_table WHEN 'outbox.message' THEN '  -- a running relay or consumer settles them, unless it is paused; see also: pillarbox blocked, and pillarbox readers'
                                  WHEN 'inbox.job' THEN '  -- then: pillarbox cancel'
                                  ELSE '  -- then: pillarbox dead-letters retry, or discard' END) AS s (what)
 WHERE p.step IN ('hold', 'attach')
    OR p.step = 'detach' AND (SELECT coalesce(u.detached_at, u.awaited_at) FROM outbox.upkeep u) < now() - interval '3 hours'
    OR p.step IN ('finalize', 'drop') AND r.planned_at < now() - interval '3 hours'
