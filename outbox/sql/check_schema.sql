-- Does:  Find a schema that is older or newer than this program, or that differs from the migrations' definitions, and an unfinished index by tenant.
-- Takes: version (that this program needs), migrate (the command)
-- Gives: severity, finding, remedy
-- Index: none; reads the catalog and positions
WITH schema AS (
    SELECT (SELECT a.version_num COLLATE "C" FROM outbox.alembic_version a) AS version
)
(SELECT 'error', format('the schema has version %%s, but this program needs %%s', coalesce(s.version, 'None'), %(version)s::text), %(migrate)s::text
   FROM schema s WHERE (s.version < %(version)s) IS NOT FALSE)
 UNION ALL
(SELECT 'warning', format('the schema has version %%s, but this program is for %%s', s.version, %(version)s::text), 'pip install --upgrade pillarbox'
   FROM schema s WHERE s.version > %(version)s)
 UNION ALL
(SELECT CASE WHEN d.restored_by IS NULL THEN 'warning' ELSE 'error' END, concat_ws(' ', d.object, d.difference),
        CASE WHEN starts_with(d.difference, 'is owned by ') THEN d.restored_by || ';  -- as a superuser' ELSE %(migrate)s::text END
   FROM schema s CROSS JOIN LATERAL (SELECT * FROM outbox.schema_differences() WHERE s.version IS NOT NULL) AS d
  ORDER BY d.object, d.difference)
 UNION ALL
(SELECT 'warning', 'outbox.message_tenant_idx is incomplete, so consumers don''t use it', %(migrate)s || ' --tenants'
   FROM pg_index i WHERE i.indexrelid = to_regclass('outbox.message_tenant_idx') AND NOT i.indisvalid)
