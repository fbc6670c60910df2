-- Does:  Look up which of its required privileges the role of a consumer lacks.
-- Takes: is_long (whether it has long handlers)
-- Gives: role, is_read_only, is_standby, missing (privileges, as GRANT writes them), hiding (tables with row-level security)
-- Index: none; reads no table
SELECT CAST(current_user AS text) AS role,
       current_setting('transaction_read_only') = 'on' AS is_read_only,
       pg_is_in_recovery() AS is_standby,
       ARRAY(SELECT needed.privilege || ' ON ' || needed.relation
               FROM (VALUES (1, 'SELECT', 'inbox.receipt'), (2, 'INSERT', 'inbox.receipt'),
                            (3, 'SELECT', 'inbox.dead_letter'), (4, 'INSERT', 'inbox.dead_letter'),
                            (5, 'SELECT', 'inbox.suspect'), (6, 'INSERT', 'inbox.suspect'),
                            (7, 'UPDATE', 'inbox.suspect'), (8, 'DELETE', 'inbox.suspect'),
                            (9, 'SELECT', 'inbox.job'), (10, 'INSERT', 'inbox.job'),
                            (11, 'UPDATE', 'inbox.job')) AS needed (place, privilege, relation)
              WHERE (needed.relation <> 'inbox.job' OR CAST(:is_long AS boolean))
                AND NOT CASE needed.privilege
                        WHEN 'DELETE' THEN has_table_privilege(needed.relation, needed.privilege)
                        ELSE has_any_column_privilege(needed.relation, needed.privilege) END
              ORDER BY needed.place) AS missing,
       ARRAY(SELECT CAST(c.relname AS text)
               FROM pg_class AS c
              WHERE c.relnamespace = to_regnamespace('inbox') AND c.relkind IN ('r', 'p') AND NOT c.relispartition
                AND row_security_active(c.oid)
              ORDER BY 1) AS hiding
