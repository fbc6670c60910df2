-- Owner part: the definitions that the migrations promise, recorded when all of them have run. The doctor reports
-- later differences, and every migration restores the definitions.

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
COMMENT ON FUNCTION outbox.rights IS 'the privileges of each of pillarbox''s roles, which migrations/grants.sql grants';

CREATE TABLE outbox.promise AS SELECT * FROM outbox.schema_facts();
ALTER TABLE outbox.promise ADD CONSTRAINT promise_pkey PRIMARY KEY (relation, fact);
COMMENT ON TABLE outbox.promise IS 'the definitions and privileges after the migrations: outbox.schema_facts() and outbox.rights()';
