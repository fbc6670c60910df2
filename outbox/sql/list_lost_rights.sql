-- Does:  List which of the given privileges their roles lack.
-- Takes: roles, kinds, objects, privileges, columns (null: the whole object), arrays of one length
-- Gives: number of the privilege, from 1
-- Index: none
-- Missing roles and objects are left out: other checks find them.
SELECT w.number
  FROM unnest(%(roles)s::text[], %(kinds)s::text[], %(objects)s::text[],
              %(privileges)s::text[], %(columns)s::text[])
       WITH ORDINALITY AS w (role, kind, object, privilege, attname, number)
  JOIN pg_roles r ON r.rolname = w.role
 WHERE NOT CASE
       WHEN w.kind = 'SCHEMA' THEN
           has_schema_privilege(r.oid, to_regnamespace(w.object)::oid, w.privilege)
       WHEN w.kind = 'SEQUENCE' THEN
           has_sequence_privilege(r.oid, to_regclass(w.object)::oid, w.privilege)
       WHEN w.kind IN ('FUNCTION', 'PROCEDURE') THEN
           has_function_privilege(r.oid, to_regprocedure(w.object)::oid, w.privilege)
       WHEN w.attname IS NULL THEN
           has_table_privilege(r.oid, to_regclass(w.object)::oid, w.privilege)
       ELSE has_column_privilege(r.oid, to_regclass(w.object)::oid,
           (SELECT a.attnum FROM pg_attribute a
             WHERE a.attrelid = to_regclass(w.object) AND a.attname = w.attname),
           w.privilege)
       END
 ORDER BY w.number
