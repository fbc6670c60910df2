-- Owner part: functions that both schemas use.

-- Transactions' ids mean nothing in a copy that gets its rows by other means: a logical replica, a
-- restored dump. A promoted standby and a restored base backup are the same cluster.
CREATE FUNCTION outbox.cluster() RETURNS text
LANGUAGE plpgsql STABLE {pinned}
AS $body$
DECLARE
    v_database oid := (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());
BEGIN
    RETURN format('%s/%s', (SELECT s.system_identifier FROM pg_control_system() s), v_database);
-- Some managed services deny access to this. A copy gets tables with other oids, unless it is one of the files.
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN format('%s/%s', 'outbox.message'::regclass::oid, v_database);
END
$body$;
COMMENT ON FUNCTION outbox.cluster IS 'identifies the cluster and the database, the same after a promotion';

-- PostgreSQL writes out numbers: 1e131000, ten bytes, is 131 kB of text, and some thousands of them are
-- more than a value can have. So one row would fail the whole query.
CREATE FUNCTION outbox.readable_headers(headers jsonb) RETURNS jsonb
LANGUAGE sql STABLE STRICT PARALLEL SAFE
RETURN CASE WHEN (headers @? 'strict $.* ? (@.type() <> "string")') IS FALSE
              OR pg_column_size(headers #> '{}'::text[]) <= 1024
            THEN headers
            ELSE '"not shown: they are not an object of strings, and over 1024 bytes"'::jsonb END;
COMMENT ON FUNCTION outbox.readable_headers IS 'headers, or why they are not shown, if their text could be very long';

-- A cast of one invalid payload would fail the whole query.
CREATE FUNCTION outbox.json_of(content_type text, payload bytea) RETURNS jsonb
LANGUAGE plpgsql STABLE {pinned}
SET standard_conforming_strings = on  -- the body is parsed at each session's first call
AS $body$
DECLARE
    v_text text;
BEGIN
    IF lower(content_type) ~ '^[[:space:]]*application/([^;[:space:]]+[+])?json[[:space:]]*(;|$)' THEN
        v_text := convert_from(payload, 'UTF8');
        -- As for headers, here with exponents of three digits, outside of strings.
        IF v_text !~ '[0-9][eE][+-]?0*[1-9][0-9][0-9]'
           OR regexp_replace(v_text, '"([^"\\]|\\.)*"', '', 'g') !~ '[0-9][eE][+-]?0*[1-9][0-9][0-9]'
        THEN
            RETURN v_text::jsonb;
        END IF;
    END IF;
    RETURN NULL;
EXCEPTION
    WHEN data_exception OR program_limit_exceeded THEN
        RETURN NULL;
END
$body$;
COMMENT ON FUNCTION outbox.json_of IS
    'a payload as JSON, or null if it isn''t JSON or has a number with an exponent of three digits';
