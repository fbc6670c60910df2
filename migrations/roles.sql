-- Administrator part, run at the start of every migration and safe to repeat: creates the roles, or
-- undoes changes to them.
--
-- The detacher exists for the one statement that only a table's owner may run and that no routine
-- can: ALTER TABLE … DETACH PARTITION … CONCURRENTLY. pg_cron logs in as the detacher. Only the role
-- that migrates is a member of it, so the maintainer gains no privileges.

DO $roles$
DECLARE
    v_role text;
    v_login text;
    -- Since PostgreSQL 16, the creator of a role is a member that can't SET ROLE to it without a grant.
    v_able text := CASE WHEN current_setting('server_version_num')::int >= 160000 THEN 'SET' ELSE 'MEMBER' END;
BEGIN
    FOR v_role, v_login IN VALUES
        ({owner_name}, 'NOLOGIN'),
        ({maintainer_name}, 'LOGIN'),  -- pg_cron refuses jobs of roles that can't log in
        ({detacher_name}, 'LOGIN'),
        ({application_name}, 'NOLOGIN'),
        ({relay_name}, 'NOLOGIN'),
        ({reader_name}, 'NOLOGIN'),
        ({operator_name}, 'NOLOGIN'),
        ({consumer_name}, 'NOLOGIN'),
        ({monitor_name}, 'NOLOGIN'),
        ({web_name}, 'NOLOGIN')
    LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_role) THEN
            EXECUTE format('CREATE ROLE %I %s', v_role, v_login);
        ELSIF v_login = 'LOGIN' AND NOT (SELECT rolcanlogin FROM pg_roles WHERE rolname = v_role) THEN
            EXECUTE format('ALTER ROLE %I LOGIN', v_role);
        END IF;
    END LOOP;
    FOREACH v_role IN ARRAY ARRAY[{owner_name}, {maintainer_name}, {detacher_name}] LOOP
        IF NOT pg_has_role(current_user, v_role, v_able) THEN
            EXECUTE format('GRANT %I TO %I', v_role, current_user);
        END IF;
    END LOOP;
    -- The detacher inherits the owner's privileges.
    IF NOT pg_has_role({detacher_name}, {owner_name}, 'USAGE') THEN
        GRANT {owner} TO {detacher};
    END IF;
    -- The page may read everything that the monitor may.
    IF NOT pg_has_role({web_name}, {monitor_name}, 'USAGE') THEN
        GRANT {monitor} TO {web};
    END IF;
    -- The operator may do everything that relays may.
    IF NOT pg_has_role({operator_name}, {relay_name}, 'USAGE') THEN
        GRANT {relay} TO {operator};
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    RAISE EXCEPTION 'role "%" may not create "%", or become it: %', current_user, v_role, SQLERRM
        USING HINT = format('let an administrator run what pillarbox migrate --sql administrator prints, or: GRANT {owner}, {maintainer}, {detacher} TO %I', current_user);
END
$roles$;
