-- Owner part: differences from the promises.

CREATE OR REPLACE FUNCTION outbox.schema_differences() RETURNS TABLE (object text, difference text, restored_by text, fact text)
LANGUAGE sql STABLE {pinned}
AS $body$
-- The owner is that of most tables, since any of them may have been given away.
WITH owner (oid) AS (
    SELECT mode() WITHIN GROUP (ORDER BY c.relowner) FROM pg_class c
     WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND c.relkind IN ('r', 'p')
), numbered (sequence, used) AS (
    -- By rows: a relay may store any position.
    VALUES ('outbox.message_seq', (SELECT max(m.seq)
                                     FROM generate_series(0, 47) AS l (lane)
                                    CROSS JOIN LATERAL (SELECT q.seq FROM outbox.message q WHERE q.lane = l.lane
                                                         ORDER BY q.seq DESC LIMIT 1) AS m)),
           ('outbox.deferral_entry_seq', (SELECT max(e.entry)
                                            FROM (SELECT q.reader FROM outbox.reader AS q UNION ALL SELECT '') AS r
                                           CROSS JOIN generate_series(0, 47) AS l (lane)
                                           CROSS JOIN LATERAL (SELECT q.entry FROM outbox.deferral q WHERE q.reader = r.reader AND q.lane = l.lane
                                                                ORDER BY q.entry DESC LIMIT 1) AS e))
)
SELECT p.relation, CASE WHEN f.fact IS NULL THEN 'lacks its ' || p.fact ELSE format('has another %s: %s', p.fact, f.definition) END, p.restored_by, p.fact
  FROM outbox.promise p LEFT JOIN outbox.schema_facts() f USING (relation, fact)
 WHERE f.definition IS DISTINCT FROM p.definition
 UNION ALL
SELECT n.sequence, format('was set back below %s, which it has assigned before', n.used), format('SELECT setval(%L, %s)', n.sequence, n.used), NULL
  FROM numbered n
 WHERE CASE WHEN n.used IS NOT NULL THEN n.used > coalesce(pg_sequence_last_value(to_regclass(n.sequence)), 0) END
 UNION ALL
SELECT c.conrelid::regclass::text, format('has not validated the constraint %I', c.conname), NULL, NULL
  FROM pg_constraint c JOIN outbox.promise p ON p.relation = c.conrelid::regclass::text AND p.fact = 'constraint ' || c.conname
 WHERE NOT c.convalidated
 UNION ALL
SELECT c.oid::regclass::text, 'is unlogged: a crash of the server would empty it', format('ALTER TABLE %s SET LOGGED', c.oid::regclass), NULL
  FROM pg_class c
 WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND c.relkind IN ('r', 'S') AND c.relpersistence = 'u'
 UNION ALL
SELECT x.object, 'is owned by ' || pg_get_userbyid(x.owner), format('ALTER %s %s OWNER TO %I', x.kind, x.object, pg_get_userbyid(o.oid)), NULL
  FROM owner o
 CROSS JOIN LATERAL (
       SELECT 'SCHEMA', n.nspname::text, n.nspowner FROM pg_namespace n WHERE n.nspname IN ('outbox', 'inbox')
        UNION ALL
       SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid::regclass::text, c.relowner FROM pg_class c
        WHERE c.oid::regclass::text IN (SELECT p.relation FROM outbox.promise p)
        UNION ALL
       SELECT 'FUNCTION', f.oid::regprocedure::text, f.proowner FROM pg_proc f
        WHERE f.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND f.prosecdef AND 'row_security=off' = ANY (f.proconfig)
       ) AS x (kind, object, owner)
 WHERE x.owner <> o.oid
 UNION ALL
-- With row_security off, a policy that is forced on the owner is an error instead of a smaller result.
SELECT f.oid::regprocedure::text, 'runs with other rights or settings than the migrations gave it',
       format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off', f.oid::regprocedure), NULL
  FROM owner o
  JOIN pg_proc f ON f.proowner = o.oid
 CROSS JOIN coalesce(f.proconfig, ARRAY[]::text[]) AS s (settings)
 WHERE f.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND f.prokind = 'f'
   AND CASE WHEN f.prosecdef THEN NOT s.settings @> ARRAY['search_path=pg_catalog, pg_temp', 'row_security=off']
            ELSE 'row_security=off' = ANY (s.settings) END
$body$;
COMMENT ON FUNCTION outbox.schema_differences IS
    'differences from the definitions that the migrations made; restored_by: the statement that restores it, or null for a constraint that only has to be validated';
