-- Administrator part: the roles and the schemas.
--
-- The detacher is for the one statement that only a table's owner may run and no routine can:
-- ALTER TABLE … DETACH PARTITION … CONCURRENTLY. pg_cron logs in as it; nobody but the role that
-- migrates is a member, so the maintainer stays as weak as it was.

DO $roles$
DECLARE
    v_role text;
    v_login text;
    -- Since 16, whoever creates a role is a member that may not become it, until he says so.
    v_able text := CASE WHEN current_setting('server_version_num')::int >= 160000 THEN 'SET' ELSE 'MEMBER' END;
BEGIN
    FOR v_role, v_login IN VALUES
        ({owner_name}, 'NOLOGIN'),
        ({maintainer_name}, 'LOGIN'),  -- pg_cron refuses jobs of roles that can't log in
        ({detacher_name}, 'LOGIN'),
        ({application_name}, 'NOLOGIN'),
        ({relay_name}, 'NOLOGIN'),
        ({consumer_name}, 'NOLOGIN'),
        ({monitor_name}, 'NOLOGIN')
    LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_role) THEN
            EXECUTE format('CREATE ROLE %I %s', v_role, v_login);
        END IF;
    END LOOP;
    FOREACH v_role IN ARRAY ARRAY[{owner_name}, {maintainer_name}, {detacher_name}] LOOP
        IF NOT pg_has_role(current_user, v_role, v_able) THEN
            EXECUTE format('GRANT %I TO %I', v_role, current_user);
        END IF;
    END LOOP;
    IF NOT pg_has_role({detacher_name}, {owner_name}, v_able) THEN
        GRANT {owner} TO {detacher};
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    RAISE EXCEPTION 'role "%" may not become "%": %', current_user, v_role, SQLERRM
        USING HINT = format('let an administrator run: GRANT {owner}, {maintainer}, {detacher} TO %I', current_user);
END
$roles$;

CREATE SCHEMA IF NOT EXISTS outbox;
CREATE SCHEMA IF NOT EXISTS inbox;
ALTER SCHEMA outbox OWNER TO {owner};
ALTER SCHEMA inbox OWNER TO {owner};
COMMENT ON SCHEMA outbox IS 'pillarbox: messages that wait for the relay';
COMMENT ON SCHEMA inbox IS 'pillarbox: receipts and deliveries of consumers';
