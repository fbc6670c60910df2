-- Owner part: what the migrations promise about the tables, in one place. The doctor reports what
-- differs, and every migration restores it. Columns' defaults and CHECK constraints are those of
-- the template, a copy that nobody inserts into; rights are in *.grants.sql.

SET LOCAL ROLE {owner};

CREATE TABLE inbox.foreign_receipt_template (LIKE inbox.foreign_receipt INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
CREATE TABLE outbox.partition_policy_template (LIKE outbox.partition_policy INCLUDING DEFAULTS INCLUDING CONSTRAINTS);

CREATE FUNCTION outbox.schema_differences() RETURNS TABLE (object text, difference text, restored_by text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $body$
WITH copied (relation, template, owner) AS (
    SELECT c.oid, t.oid, (SELECT m.relowner FROM pg_class m WHERE m.oid = 'outbox.message'::regclass)
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
SELECT c.oid::regclass::text, 'is owned by ' || pg_get_userbyid(c.relowner),
       format('ALTER %s %s OWNER TO %I', CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid::regclass, pg_get_userbyid(o.owner))
  FROM (SELECT t.relation, t.owner FROM copied t
         UNION SELECT t.template, t.owner FROM copied t
         UNION SELECT to_regclass(n.sequence), t.owner FROM numbered n, copied t) AS o (relation, owner)
  JOIN pg_class c ON c.oid = o.relation
 WHERE c.relowner <> o.owner
 UNION ALL
-- With row_security off, a policy that is forced on the owner is an error instead of a smaller result.
SELECT f.oid::regprocedure::text, 'may be blinded by row-level security', format('ALTER FUNCTION %s SET row_security = off', f.oid::regprocedure)
  FROM pg_proc f
 WHERE f.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND f.prosecdef AND f.prokind = 'f'
   AND f.proowner = (SELECT m.relowner FROM pg_class m WHERE m.oid = 'outbox.message'::regclass)
   AND 'row_security=off' <> ALL (coalesce(f.proconfig, ARRAY[]::text[]))
$body$;
COMMENT ON FUNCTION outbox.schema_differences IS
    'what differs from what the migrations made; restored_by: the statement that restores it, or null for a constraint that only has to be validated';

RESET ROLE;
