-- Owner part: what the migrations promise about the tables, in one place: their definitions, recorded when
-- all migrations have run. The doctor reports what differs since, and every migration restores it.

CREATE FUNCTION outbox.schema_facts() RETURNS TABLE (relation text, fact text, definition text, restored_by text)
LANGUAGE sql STABLE {pinned}
{utc}
AS $body$
WITH ours AS (
    SELECT c.oid, c.oid::regclass::text AS relation FROM pg_class c
     WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND c.relkind IN ('r', 'p', 'S')
       AND NOT c.relispartition AND c.relname <> 'alembic_version'
), facts AS (
    SELECT o.relation, 'definition' AS fact, d.text AS definition, format('ALTER SEQUENCE %s %s', o.relation, d.text) AS restored_by
      FROM ours o JOIN pg_sequence s ON s.seqrelid = o.oid
     CROSS JOIN LATERAL (SELECT format('AS %s INCREMENT %s MINVALUE %s MAXVALUE %s CACHE %s %s START %s', s.seqtypid::regtype, s.seqincrement, s.seqmin, s.seqmax,
                                       s.seqcache, CASE WHEN s.seqcycle THEN 'CYCLE' ELSE 'NO CYCLE' END, s.seqstart)) AS d (text)
     UNION ALL
    SELECT o.relation, 'default of ' || a.attname, pg_get_expr(d.adbin, d.adrelid),
           format('ALTER TABLE %s ALTER COLUMN %I SET DEFAULT %s', o.relation, a.attname, pg_get_expr(d.adbin, d.adrelid))
      FROM ours o JOIN pg_attrdef d ON d.adrelid = o.oid JOIN pg_attribute a ON a.attrelid = o.oid AND a.attnum = d.adnum
     UNION ALL
    SELECT o.relation, 'NOT NULL of ' || a.attname, 'NOT NULL', format('ALTER TABLE %s ALTER COLUMN %I SET NOT NULL', o.relation, a.attname)
      FROM ours o JOIN pg_attribute a ON a.attrelid = o.oid AND a.attnum > 0 AND a.attnotnull
     UNION ALL
    SELECT o.relation, 'constraint ' || c.conname, d.text,
           format('ALTER TABLE %s DROP CONSTRAINT IF EXISTS %2$I, ADD CONSTRAINT %2$I %3$s NOT VALID', o.relation, c.conname, d.text)
      FROM ours o JOIN pg_constraint c ON c.conrelid = o.oid AND c.contype IN ('c', 'f')
     CROSS JOIN LATERAL (SELECT regexp_replace(pg_get_constraintdef(c.oid), ' NOT VALID$', '')) AS d (text)
     UNION ALL
    SELECT o.relation, 'trigger ' || t.tgname, CASE WHEN t.tgenabled IN ('O', 'A') THEN pg_get_triggerdef(t.oid) ELSE 'disabled' END,
           format('%s; ALTER TABLE %s ENABLE TRIGGER %I', regexp_replace(pg_get_triggerdef(t.oid), '^CREATE', 'CREATE OR REPLACE'), o.relation, t.tgname)
      FROM ours o JOIN pg_trigger t ON t.tgrelid = o.oid AND NOT t.tgisinternal
     UNION ALL
    SELECT o.relation, 'index ' || i.indexrelid::regclass, CASE WHEN i.indisvalid THEN pg_get_indexdef(i.indexrelid) ELSE 'invalid' END,
           CASE WHEN k.oid IS NULL
                THEN format('DROP INDEX IF EXISTS %s; %s', i.indexrelid::regclass, replace(pg_get_indexdef(i.indexrelid), ' ON ONLY ', ' ON '))
                ELSE format('ALTER TABLE %s DROP CONSTRAINT IF EXISTS %2$I, ADD CONSTRAINT %2$I %3$s', o.relation, k.conname, pg_get_constraintdef(k.oid)) END
      FROM ours o JOIN pg_index i ON i.indrelid = o.oid
      LEFT JOIN pg_constraint k ON k.conindid = i.indexrelid AND k.contype IN ('p', 'u')
)
SELECT relation, fact, definition, restored_by FROM facts
$body$;
COMMENT ON FUNCTION outbox.schema_facts IS 'the definitions of the tables and sequences, each with the statement that makes it again';

CREATE FUNCTION outbox.rights() RETURNS TABLE (relation text, fact text)
LANGUAGE sql STABLE {pinned}
AS $body$
SELECT DISTINCT o.name, format('right of %s to %s', r.rolname, concat_ws(' of ', a.privilege_type, o.attname))
  FROM (SELECT n.nspname::text, n.nspacl, NULL FROM pg_namespace n WHERE n.nspname IN ('outbox', 'inbox')
         UNION ALL
        SELECT c.oid::regclass::text, x.acl, x.attname
          FROM pg_class c
         CROSS JOIN LATERAL (SELECT c.relacl, NULL UNION ALL SELECT t.attacl, t.attname FROM pg_attribute t WHERE t.attrelid = c.oid) AS x (acl, attname)
         WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND NOT c.relispartition
         UNION ALL
        SELECT f.oid::regprocedure::text, f.proacl, NULL FROM pg_proc f
         WHERE f.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)) AS o (name, acl, attname)
 CROSS JOIN LATERAL aclexplode(o.acl) AS a
  JOIN pg_roles r ON r.oid = a.grantee
   AND r.rolname IN ({maintainer_name}, {detacher_name}, {application_name}, {relay_name}, {reader_name}, {operator_name}, {consumer_name}, {monitor_name}, {web_name})
$body$;
COMMENT ON FUNCTION outbox.rights IS 'what each of our roles may do, which migrations/grants.sql grants';

CREATE TABLE outbox.promise AS SELECT * FROM outbox.schema_facts();
ALTER TABLE outbox.promise ADD CONSTRAINT promise_pkey PRIMARY KEY (relation, fact);
COMMENT ON TABLE outbox.promise IS 'what the migrations made: outbox.schema_facts() and outbox.rights() when they ended';

CREATE FUNCTION outbox.schema_differences() RETURNS TABLE (object text, difference text, restored_by text, fact text)
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
           ('inbox.message_seq', (SELECT max(m.seq)
                                    FROM generate_series(0, 15) AS l (lane)
                                   CROSS JOIN LATERAL (SELECT q.seq FROM inbox.message q WHERE q.lane = l.lane
                                                        ORDER BY q.seq DESC LIMIT 1) AS m)),
           ('outbox.deferral_entry_seq', (SELECT max(e.entry)
                                            FROM outbox.reader AS r
                                           CROSS JOIN generate_series(0, 47) AS l (lane)
                                           CROSS JOIN LATERAL (SELECT q.entry FROM outbox.deferral q WHERE q.reader = r.reader AND q.lane = l.lane
                                                                ORDER BY q.entry DESC LIMIT 1) AS e)),
           ('inbox.deferral_entry_seq', (SELECT max(e.entry)
                                           FROM (SELECT DISTINCT s.consumer FROM inbox.subscription s) AS c
                                          CROSS JOIN generate_series(0, 15) AS l (lane)
                                          CROSS JOIN LATERAL (SELECT q.entry FROM inbox.deferral q WHERE q.consumer = c.consumer AND q.lane = l.lane
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
    'what differs from what the migrations made; restored_by: the statement that restores it, or null for a constraint that only has to be validated';
