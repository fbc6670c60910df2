-- For all but the administrator's part: a member of the owner must not become a superuser. SET ROLE isn't enough
-- to run what the owner has, since a function can RESET ROLE.

DO $superuser$
DECLARE
    x record;
BEGIN
    FOR x IN
        {list_lesser_owners}
    LOOP
        RAISE EXCEPTION '%', x.finding USING ERRCODE = 'insufficient_privilege', HINT = x.remedy;
    END LOOP;
END
$superuser$;
