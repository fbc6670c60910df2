-- Owner part: what the migrations promise about the tables, in one place. The doctor reports what
-- differs, and every migration restores it. Columns' defaults and CHECK constraints are those of
-- the template, a copy that nobody inserts into; indexes are listed; rights are in *.grants.sql.

SET LOCAL ROLE {owner};

CREATE TABLE inbox.foreign_receipt_template (LIKE inbox.foreign_receipt INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
CREATE TABLE outbox.partition_policy_template (LIKE outbox.partition_policy INCLUDING DEFAULTS INCLUDING CONSTRAINTS);

CREATE TABLE outbox.index_promise AS
SELECT i.indrelid::regclass::text AS on_table, i.indexrelid::regclass::text AS name,
       CASE WHEN k.oid IS NULL
            THEN format('DROP INDEX IF EXISTS %s; %s', i.indexrelid::regclass, replace(pg_get_indexdef(i.indexrelid), ' ON ONLY ', ' ON '))
            ELSE format('ALTER TABLE %s DROP CONSTRAINT IF EXISTS %2$I, ADD CONSTRAINT %2$I %3$s', i.indrelid::regclass, k.conname, pg_get_constraintdef(k.oid))
       END AS made_by
  FROM pg_index i
  JOIN pg_class c ON c.oid = i.indrelid AND NOT c.relispartition
  LEFT JOIN pg_constraint k ON k.conindid = i.indexrelid AND k.contype IN ('p', 'u')
 WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND c.relname <> 'alembic_version';
COMMENT ON TABLE outbox.index_promise IS 'the indexes and keys that the migrations made, and the statements that make them again';

CREATE FUNCTION outbox.schema_differences() RETURNS TABLE (object text, difference text, restored_by text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $body$
-- The owner is that of most tables, since any of them may have been given away.
WITH owner (oid) AS (
    SELECT mode() WITHIN GROUP (ORDER BY c.relowner) FROM pg_class c
     WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND c.relkind IN ('r', 'p')
), copied (relation, template) AS (
    SELECT c.oid, t.oid
      FROM pg_class t
      JOIN pg_class c ON c.relnamespace = t.relnamespace AND t.relname = c.relname || '_template'
     WHERE t.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
), numbered (sequence, used) AS (
    VALUES ('outbox.message_seq', (SELECT max(w.up_to) FROM outbox.watermark w WHERE w.cluster = outbox.cluster())),
           ('inbox.delivery_seq', (SELECT max(w.up_to) FROM inbox.watermark w WHERE w.cluster = outbox.cluster())),
           ('outbox.deferral_entry_seq', NULL),
           ('inbox.redelivery_entry_seq', NULL)
), fired (on_table, name, definition) AS (
    VALUES ('outbox.message', 'message_doorbell',
            'BEFORE INSERT ON outbox.message FOR EACH STATEMENT WHEN (NOT pg_try_advisory_xact_lock_shared(1885957228, 100))'
            ' EXECUTE FUNCTION outbox.ring_doorbell(''outbox_message'')'),
           ('inbox.delivery', 'delivery_doorbell',
            'AFTER INSERT ON inbox.delivery FOR EACH STATEMENT WHEN (NOT pg_try_advisory_xact_lock_shared(1885957228, 101))'
            ' EXECUTE FUNCTION outbox.ring_doorbell(''inbox_delivery'')'),
           ('outbox.partition_policy', 'partition_policy_inserted',
            'AFTER INSERT ON outbox.partition_policy REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION outbox.follow_policy()'),
           ('outbox.partition_policy', 'partition_policy_updated',
            'AFTER UPDATE ON outbox.partition_policy REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION outbox.follow_policy()')
)
SELECT n.sequence,
       format('takes numbers in steps of %s, caches %s of them%s: keys would lose their order', s.seqincrement, s.seqcache,
              CASE WHEN s.seqcycle THEN ', starts again at its end' WHEN s.seqmax < 9223372036854775807 THEN ', ends at ' || s.seqmax ELSE '' END),
       format('ALTER SEQUENCE %s AS bigint INCREMENT 1 MINVALUE 1 MAXVALUE 9223372036854775807 CACHE 1 NO CYCLE', n.sequence)
  FROM numbered n JOIN pg_sequence s ON s.seqrelid = to_regclass(n.sequence)
 WHERE (s.seqincrement, s.seqcache, s.seqcycle, s.seqmin, s.seqmax) <> (1, 1, false, 1, 9223372036854775807)
 UNION ALL
SELECT n.sequence, format('was set back below %s, which it has assigned before', n.used), format('SELECT setval(%L, %s)', n.sequence, n.used)
  FROM numbered n
 WHERE CASE WHEN n.used IS NOT NULL THEN n.used > coalesce(pg_sequence_last_value(to_regclass(n.sequence)), 0) END
 UNION ALL
SELECT format('%s.%I', t.relation::regclass, w.attname), 'has the default ' || coalesce(pg_get_expr(e.adbin, e.adrelid), 'null'),
       format('ALTER TABLE %s ALTER COLUMN %I SET DEFAULT %s', t.relation::regclass, w.attname, pg_get_expr(d.adbin, d.adrelid))
  FROM copied t
  JOIN pg_attrdef d ON d.adrelid = t.template
  JOIN pg_attribute w ON w.attrelid = t.template AND w.attnum = d.adnum
  JOIN pg_attribute a ON a.attrelid = t.relation AND a.attname = w.attname
  LEFT JOIN pg_attrdef e ON e.adrelid = t.relation AND e.adnum = a.attnum
 WHERE pg_get_expr(e.adbin, e.adrelid) IS DISTINCT FROM pg_get_expr(d.adbin, d.adrelid)
 UNION ALL
SELECT t.relation::regclass::text,
       format('has %s constraint %I', CASE WHEN f.oid IS NULL THEN 'no' WHEN w.differs THEN 'another' ELSE 'not validated the' END, c.conname),
       CASE WHEN f.oid IS NULL OR w.differs THEN
            format('ALTER TABLE %s %s ADD CONSTRAINT %I %s NOT VALID', t.relation::regclass,
                   CASE WHEN w.differs THEN format('DROP CONSTRAINT %I,', c.conname) END, c.conname, w.definition) END
  FROM copied t
  JOIN pg_constraint c ON c.conrelid = t.template AND c.contype = 'c'
  LEFT JOIN pg_constraint f ON f.conrelid = t.relation AND f.conname = c.conname
 CROSS JOIN LATERAL (
       SELECT v.wanted, v.wanted <> v.found FROM (
           SELECT regexp_replace(pg_get_constraintdef(c.oid), ' NOT VALID$', ''), regexp_replace(pg_get_constraintdef(f.oid), ' NOT VALID$', '')) AS v (wanted, found)
       ) AS w (definition, differs)
 WHERE f.oid IS NULL OR w.differs OR NOT f.convalidated
 UNION ALL
SELECT f.on_table, CASE WHEN t.oid IS NULL THEN 'has no trigger ' ELSE 'has disabled its trigger ' END || f.name,
       CASE WHEN t.oid IS NULL THEN format('CREATE TRIGGER %s %s', f.name, f.definition)
            ELSE format('ALTER TABLE %s ENABLE TRIGGER %s', f.on_table, f.name) END
  FROM fired f
  LEFT JOIN pg_trigger t ON t.tgrelid = to_regclass(f.on_table) AND t.tgname = f.name
 WHERE t.tgenabled IS NULL OR t.tgenabled NOT IN ('O', 'A')
 UNION ALL
SELECT p.on_table, 'lacks its index ' || p.name, p.made_by
  FROM outbox.index_promise p
  LEFT JOIN pg_index i ON i.indexrelid = to_regclass(p.name) AND i.indrelid = to_regclass(p.on_table)
 WHERE i.indisvalid IS NOT TRUE
 UNION ALL
SELECT format('%s.%I', t.relation::regclass, a.attname), 'accepts null', format('ALTER TABLE %s ALTER COLUMN %I SET NOT NULL', t.relation::regclass, a.attname)
  FROM copied t
  JOIN pg_attribute w ON w.attrelid = t.template AND w.attnum > 0 AND w.attnotnull
  JOIN pg_attribute a ON a.attrelid = t.relation AND a.attname = w.attname
 WHERE NOT a.attnotnull
 UNION ALL
SELECT c.oid::regclass::text, 'is unlogged: a crash of the server would empty it', format('ALTER TABLE %s SET LOGGED', c.oid::regclass)
  FROM pg_class c
 WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND c.relkind = 'r' AND c.relpersistence = 'u'
 UNION ALL
SELECT x.object, 'is owned by ' || pg_get_userbyid(x.owner), format('ALTER %s %s OWNER TO %I', x.kind, x.object, pg_get_userbyid(o.oid))
  FROM owner o
 CROSS JOIN LATERAL (
       SELECT 'SCHEMA', n.nspname::text, n.nspowner FROM pg_namespace n WHERE n.nspname IN ('outbox', 'inbox')
        UNION ALL
       SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid::regclass::text, c.relowner FROM pg_class c
        WHERE c.oid IN (SELECT t.relation FROM copied t UNION ALL SELECT t.template FROM copied t
                         UNION ALL SELECT to_regclass(p.on_table) FROM outbox.index_promise p UNION ALL SELECT to_regclass(n.sequence) FROM numbered n)
        UNION ALL
       SELECT 'FUNCTION', f.oid::regprocedure::text, f.proowner FROM pg_proc f
        WHERE f.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND f.prosecdef AND 'row_security=off' = ANY (f.proconfig)
       ) AS x (kind, object, owner)
 WHERE x.owner <> o.oid
 UNION ALL
-- With row_security off, a policy that is forced on the owner is an error instead of a smaller result.
SELECT f.oid::regprocedure::text, 'runs with other rights or settings than the migrations gave it',
       format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off', f.oid::regprocedure)
  FROM owner o
  JOIN pg_proc f ON f.proowner = o.oid
 CROSS JOIN coalesce(f.proconfig, ARRAY[]::text[]) AS s (settings)
 WHERE f.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND f.prokind = 'f'
   AND CASE WHEN f.prosecdef THEN NOT s.settings @> ARRAY['search_path=pg_catalog, pg_temp', 'row_security=off']
            ELSE 'row_security=off' = ANY (s.settings) END
$body$;
COMMENT ON FUNCTION outbox.schema_differences IS
    'what differs from what the migrations made; restored_by: the statement that restores it, or null for a constraint that only has to be validated';

RESET ROLE;
