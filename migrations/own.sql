-- Administrator part: gives all objects to the owner. Otherwise, only the role that created Alembic's table
-- could run later migrations, and grants would fail on objects that another role owns by now. Reads only the
-- catalog: objects made by the owner's members must not run with an administrator's rights.

DO $own$
DECLARE
    v_owner oid := (SELECT r.oid FROM pg_roles r WHERE r.rolname = {owner_name});
    v_object text;
BEGIN
    FOR v_object IN
        SELECT format('%s %s', CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid::regclass)
          FROM pg_class c
         WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND c.relowner <> v_owner
           AND c.relkind IN ('r', 'p', 'S') AND NOT c.relispartition
         UNION ALL
        SELECT format('FUNCTION %s', f.oid::regprocedure) FROM pg_proc f
         WHERE f.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND f.proowner <> v_owner
           AND f.prosecdef AND 'row_security=off' = ANY (f.proconfig)
    LOOP
        BEGIN
            EXECUTE format('ALTER %s OWNER TO %I', v_object, {owner_name});
        EXCEPTION WHEN insufficient_privilege THEN
            RAISE EXCEPTION '%', SQLERRM USING ERRCODE = 'insufficient_privilege',
                HINT = format('as a superuser, run pillarbox migrate or ALTER %s OWNER TO %I', v_object, {owner_name});
        END;
    END LOOP;
END
$own$;
