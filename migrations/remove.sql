-- Administrator part: removes everything of ours, with all data. Keeps the extensions and the roles, which others may use.

-- pg_partman's record of our tables would outlive them.
DO $partman$
BEGIN
    IF {partman_name} IS NOT NULL THEN
        EXECUTE format('DELETE FROM %I.part_config c USING outbox.partition_policy p WHERE c.parent_table = p.parent_table', {partman_name});
    END IF;
EXCEPTION WHEN undefined_table OR insufficient_privilege THEN
    NULL;
END
$partman$;

DO $owned$
DECLARE
    v_object text;
BEGIN
    SELECT i.type || ' ' || i.identity INTO v_object
      FROM pg_shdepend o CROSS JOIN LATERAL pg_identify_object(o.classid, o.objid, o.objsubid) AS i
     WHERE o.refclassid = 'pg_authid'::regclass AND o.refobjid = {owner_name}::regrole AND o.deptype = 'o'
       AND o.dbid = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
       AND coalesce(i.schema, i.name) NOT IN ('outbox', 'inbox')
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the % belongs to %, but is not in our schemas', v_object, {owner_name}
            USING HINT = 'give it another owner, or drop it';
    END IF;
    -- This also revokes what the owner may do with pg_partman.
    DROP OWNED BY {owner} RESTRICT;
EXCEPTION WHEN dependent_objects_still_exist THEN
    GET STACKED DIAGNOSTICS v_object = PG_EXCEPTION_DETAIL;
    RAISE EXCEPTION 'somebody''s objects depend on ours: %', replace(v_object, chr(10), ', ')
        USING HINT = 'nothing was removed: drop them first';
END
$owned$;
