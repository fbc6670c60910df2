-- Administrator part: the roles and the schemas.

DO $roles$
DECLARE
    v_role text;
    v_login text;
BEGIN
    FOR v_role, v_login IN VALUES
        ({owner_name}, 'NOLOGIN'),
        ({maintainer_name}, 'LOGIN'),  -- pg_cron refuses jobs of roles that can't log in
        ({application_name}, 'NOLOGIN'),
        ({relay_name}, 'NOLOGIN'),
        ({consumer_name}, 'NOLOGIN'),
        ({monitor_name}, 'NOLOGIN')
    LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_role) THEN
            EXECUTE format('CREATE ROLE %I %s', v_role, v_login);
        END IF;
    END LOOP;
    FOREACH v_role IN ARRAY ARRAY[{owner_name}, {maintainer_name}] LOOP
        IF NOT pg_has_role(current_user, v_role, 'MEMBER') THEN
            EXECUTE format('GRANT %I TO %I', v_role, current_user);
        END IF;
    END LOOP;
END
$roles$;

CREATE SCHEMA IF NOT EXISTS outbox;
CREATE SCHEMA IF NOT EXISTS inbox;
ALTER SCHEMA outbox OWNER TO {owner};
ALTER SCHEMA inbox OWNER TO {owner};
COMMENT ON SCHEMA outbox IS 'pillarbox: messages that wait for the relay';
COMMENT ON SCHEMA inbox IS 'pillarbox: receipts and deliveries of consumers';
