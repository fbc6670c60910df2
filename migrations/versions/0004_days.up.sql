-- Owner part: partitions made without pg_partman: on servers that lack it, and by relays and consumers, so that
-- inserts succeed without a scheduled upkeep while one of them runs.

-- Made and named as by pg_partman. With ATTACH PARTITION, unlike PARTITION OF, writers and readers of the table
-- continue, and none of them ever waits behind its request for a lock.
CREATE FUNCTION outbox.make_partition(parent text, starts_at timestamptz) RETURNS void
LANGUAGE plpgsql {pinned}
SET quote_all_identifiers = off
{utc}
AS $body$
DECLARE
    v_partition text := outbox.partition_name(parent, starts_at);
    x record;
BEGIN
    SELECT q.span, t.relpersistence = 'u' AS is_unlogged, array_to_string(t.reloptions, ', ') AS options, s.spcname
      INTO STRICT x
      FROM outbox.partition_policy q
      JOIN pg_class c ON c.oid = q.parent_table::regclass
      JOIN pg_class t ON t.oid = q.template::regclass
      LEFT JOIN pg_tablespace s ON s.oid = c.reltablespace
     WHERE q.parent_table = parent;
    EXECUTE format('CREATE %s TABLE %s (LIKE %s INCLUDING ALL EXCLUDING IDENTITY EXCLUDING STATISTICS)%s%s',
                   CASE WHEN x.is_unlogged THEN 'UNLOGGED' END, v_partition, parent::regclass,
                   ' WITH (' || x.options || ')', ' TABLESPACE ' || quote_ident(x.spcname));
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                   parent::regclass, v_partition, starts_at, starts_at + x.span);
END
$body$;
COMMENT ON FUNCTION outbox.make_partition IS 'create the partition of a table that begins at this time';

CREATE FUNCTION outbox.make_days() RETURNS TABLE (problem text, remedy text)
LANGUAGE plpgsql SECURITY DEFINER {pinned}
{utc}
SET lock_timeout = '200ms'
SET jit = off
AS $body$
DECLARE
    v_leader text;
    v_tables text[];
    v_table text;
    v_hint text;
BEGIN
    -- A pause of the upkeep is what this function is for. This clock shows no time at which anything ran here.
    IF EXISTS (
        SELECT FROM outbox.upkeep u
         WHERE now() < least(u.awaited_at, u.accepted_at) - interval '1 day'
            OR now() > interval '1 year' + greatest(u.awaited_at, u.succeeded_at, u.accepted_at, (
                   SELECT max(x.ends_at) FROM outbox.partition_policy p, outbox.partitions(p.parent_table) x)))
    THEN
        problem := outbox.clock_problem();
        remedy := 'set the server''s clock; if SELECT now() is right, run: pillarbox maintain --accept-clock';
        IF problem IS NOT NULL THEN
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    FOR v_leader IN SELECT p.parent_table FROM outbox.partition_policy p WHERE p.follows IS NULL ORDER BY 1 LOOP
        v_tables := v_leader || ARRAY(SELECT p.parent_table FROM outbox.partition_policy p WHERE p.follows = v_leader ORDER BY 1);
        -- Each table with its followers, in a separate subtransaction.
        BEGIN
            -- Otherwise an upkeep is making them.
            CONTINUE WHEN NOT (SELECT bool_and(pg_try_advisory_xact_lock(hashtextextended('outbox.make_partitions ' || t, 0)))
                                 FROM unnest(v_tables) t);
            FOREACH v_table IN ARRAY v_tables LOOP
                PERFORM outbox.make_partition(v_table, m.starts_at) FROM outbox.missing_partitions(v_table) m;
                PERFORM outbox.keep_forgotten(v_table);
            END LOOP;
        EXCEPTION WHEN OTHERS THEN
            GET STACKED DIAGNOSTICS v_hint = PG_EXCEPTION_HINT;
            problem := format('no partitions of %s: %s', v_leader, outbox.without_row(SQLERRM, SQLSTATE));
            remedy := coalesce(nullif(v_hint, ''), CASE SQLSTATE
                WHEN '55P03' THEN 'a transaction keeps the table locked: pillarbox doctor names it'
                ELSE 'pillarbox doctor finds the cause' END);
            RETURN NEXT;
        END;
    END LOOP;
END
$body$;
COMMENT ON FUNCTION outbox.make_days IS
    'create the missing partitions of all tables, without pg_partman; returns what could not be created, and why';

-- A new consumer's first messages may be some days old.
SELECT outbox.make_partition(p.parent_table, outbox.begin_of(p.span, now() - n * interval '24 hours'))
  FROM outbox.partition_policy p CROSS JOIN generate_series(1, p.premake) AS n;
SELECT outbox.make_partitions(parent_table) FROM outbox.partition_policy;
