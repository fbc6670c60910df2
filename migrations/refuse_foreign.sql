-- For both parts: no object of another role may run code as the role that migrates. None can be added
-- later: the schemas exist now, and only trusted roles may create objects in them.
-- All but the administrator's part runs functions of the owner, and a function can RESET ROLE: so no superuser
-- may run it if members of the owner aren't superusers.

DO $foreign$
DECLARE
    v_owner text := (SELECT pg_get_userbyid(c.relowner) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                      WHERE n.nspname = 'outbox' AND c.relname = 'message');
    x record;
BEGIN
    IF v_owner <> {owner_name} THEN
        RAISE EXCEPTION 'the tables in this database belong to "%", not to "%"', v_owner, {owner_name}
            USING HINT = CASE
                WHEN to_regclass('outbox.partition_policy') IS NULL
                THEN 'outbox.message exists, but pillarbox migrate did not create it: rename it, or use another database'
                WHEN v_owner ~ '^\w+_owner$' THEN format('add --role-prefix %s', left(v_owner, -length('_owner')))
                ELSE 'restore the roles (pg_dumpall --roles-only) before the database; if the tables were reassigned, pillarbox doctor prints how to get them back' END;
    END IF;
    FOR x IN
        {list_foreign_objects}
    LOOP
        RAISE EXCEPTION '%', x.finding USING ERRCODE = 'insufficient_privilege', HINT = x.remedy;
    END LOOP;
    FOR x IN
        SELECT l.* FROM ({list_lesser_owners}) AS l WHERE {runs_all}
    LOOP
        RAISE EXCEPTION '%', x.finding USING ERRCODE = 'insufficient_privilege', HINT = x.remedy;
    END LOOP;
END
$foreign$;
