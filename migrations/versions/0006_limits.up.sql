-- Owner part: limits on the columns of a message, whoever inserts it. The numbers are those of
-- outbox/limits.py. No rows are read under the table's lock: existing rows stay as they are, and the
-- relay moves those that are too large to the dead letters; validate.sql reads them afterwards.

SET LOCAL ROLE {owner};

DO $limits$
DECLARE
    -- Existing rows are exempt, or the constraints could never be validated.
    v_before text := CASE WHEN EXISTS (SELECT FROM outbox.message)
                          THEN format('%L::timestamptz', clock_timestamp()) ELSE '''-infinity''::timestamptz' END;
    v_table text;
BEGIN
    FOR v_table IN
        SELECT unnest(ARRAY['outbox.message', 'outbox.message_template'])
        UNION ALL
        -- Detached partitions, which are attached again if they have an unsettled row.
        SELECT r.partition
          FROM outbox.retiring_partition r JOIN pg_class c ON c.oid = to_regclass(r.partition)
         WHERE r.parent_table = 'outbox.message' AND NOT c.relispartition
           AND NOT EXISTS (SELECT FROM pg_constraint n WHERE n.conrelid = c.oid AND n.conname = 'topic_size')
    LOOP
        EXECUTE format($ddl$
            ALTER TABLE %s
                ADD CONSTRAINT topic_size CHECK (created_at < %2$s OR octet_length(topic) BETWEEN 1 AND 2048) NOT VALID,
                ADD CONSTRAINT key_size CHECK (created_at < %2$s OR octet_length(key) BETWEEN 1 AND 2048) NOT VALID,
                ADD CONSTRAINT tenant_size CHECK (created_at < %2$s OR octet_length(tenant) BETWEEN 1 AND 1024) NOT VALID,
                ADD CONSTRAINT content_type_size CHECK (created_at < %2$s OR octet_length(content_type) BETWEEN 1 AND 1020) NOT VALID,
                -- Appending nothing gives the size without compression, of which 255 times is the most.
                ADD CONSTRAINT headers_size CHECK (
                    created_at < %2$s OR pg_column_size(headers) <= 1024
                    OR pg_column_size(headers || '{}'::jsonb) <= 262208) NOT VALID,
                -- A number of ten bytes, 1e131000, is 131 kB of text. Null, and not false, if it is no object.
                ADD CONSTRAINT headers_are_strings CHECK (
                    created_at < %2$s OR (headers @? 'strict $.* ? (@.type() <> "string")') IS FALSE) NOT VALID,
                ADD CONSTRAINT payload_size CHECK (created_at < %2$s OR octet_length(payload) <= 67108864) NOT VALID,
                ADD CONSTRAINT schema_version_positive CHECK (created_at < %2$s OR schema_version >= 1) NOT VALID
            $ddl$, v_table, v_before);
    END LOOP;
END
$limits$;

RESET ROLE;
