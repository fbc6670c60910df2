-- Owner part: hourly, daily and weekly partitions, and the change from one to another. Their
-- bounds nest in UTC (weeks begin on Monday), so that old and new partitions meet without a gap.

CREATE FUNCTION outbox.missing_partitions(parent text)
RETURNS TABLE (starts_at timestamptz, ends_at timestamptz)
LANGUAGE sql STABLE ROWS 10 {pinned}
BEGIN ATOMIC
    WITH policy AS MATERIALIZED (
        SELECT q.span, q.follows, outbox.begin_of(q.span, now()) AS begins_at,
               -- If the clock can't be trusted, only today and tomorrow, which rows need.
               CASE WHEN outbox.clock_problem() IS NULL THEN q.premake * q.span ELSE greatest(q.span, interval '1 day') END AS ahead
          FROM outbox.partition_policy q WHERE q.parent_table = parent
    ), found AS MATERIALIZED (
        SELECT x.starts_at, x.ends_at FROM outbox.partitions(parent) x
    ), existing AS MATERIALIZED (
        SELECT x.starts_at, x.ends_at FROM policy p, found x WHERE x.ends_at > p.begins_at
    )
    SELECT d, d + p.span
      FROM policy p
     CROSS JOIN LATERAL (
           -- After a change of width the current one may be wider than future ones.
           SELECT greatest(p.begins_at, max(x.ends_at) - p.span)
             FROM existing x WHERE x.starts_at <= now() AND x.ends_at > now()
           ) AS present (starts_at)
     CROSS JOIN LATERAL generate_series(present.starts_at, present.starts_at + p.ahead, p.span) AS d
     WHERE NOT EXISTS (SELECT FROM existing x WHERE x.starts_at < d + p.span AND x.ends_at > d)
        -- The current one is missing even if others leave no room for it: its creation then says so.
        OR (d <= now() AND d + p.span > now() AND NOT EXISTS (SELECT FROM existing x WHERE x.starts_at <= now() AND x.ends_at > now()))
     UNION
    SELECT d, d + p.span
      FROM (SELECT q.* FROM policy q WHERE q.follows IS NOT NULL) AS p
     CROSS JOIN LATERAL outbox.partitions(p.follows) AS l
     CROSS JOIN LATERAL generate_series(outbox.begin_of(p.span, l.starts_at), l.ends_at - interval '1 microsecond', p.span) AS d
     WHERE NOT EXISTS (SELECT FROM found x WHERE x.starts_at < d + p.span AND x.ends_at > d)
       -- One that was detached although its leader needs it: outbox.finish_detached attaches it again.
       AND NOT EXISTS (SELECT FROM outbox.retiring_partition r
                        WHERE r.parent_table = parent AND to_regclass(r.partition) IS NOT NULL
                          AND r.starts_at < d + p.span AND r.ends_at > d)
     ORDER BY 1;
END;
COMMENT ON FUNCTION outbox.missing_partitions IS
    'the partitions that don''t exist but should: the current and future ones of the policy, and those that a leader''s need';

CREATE FUNCTION outbox.set_interval(parent text, span interval, premake integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER {pinned}
{utc}
SET lock_timeout = '2s'
SET jit = off
AS $body$
DECLARE
    p outbox.partition_policy;
    v_tables text[];
    v_table text;
    v_end timestamptz;
    v_from timestamptz;
    v_partition regclass;
    v_has_rows boolean;
BEGIN
    SELECT * INTO STRICT p FROM outbox.partition_policy WHERE parent_table = parent FOR UPDATE;
    v_tables := parent || ARRAY(SELECT q.parent_table FROM outbox.partition_policy q WHERE q.follows = parent ORDER BY 1);
    -- The first partition of the new width that begins after the current ones end.
    v_from := outbox.begin_of(set_interval.span, now()) + set_interval.span;
    FOREACH v_table IN ARRAY v_tables LOOP
        EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', v_table::regclass);
        SELECT max(x.ends_at) INTO v_end FROM outbox.partitions(v_table) x WHERE x.starts_at <= now() AND x.ends_at > now();
        v_from := greatest(v_from, v_end);
    END LOOP;
    FOREACH v_table IN ARRAY v_tables LOOP
        PERFORM outbox.make_partition(v_table, d)
           FROM generate_series(outbox.begin_of(p.span, now()), v_from - interval '1 microsecond', p.span) AS d
          WHERE NOT EXISTS (SELECT FROM outbox.partitions(v_table) x WHERE x.starts_at < d + p.span AND x.ends_at > d);
        FOR v_partition IN SELECT x.partition FROM outbox.partitions(v_table) x WHERE x.starts_at >= v_from LOOP
            EXECUTE format('SELECT EXISTS (SELECT FROM %s)', v_partition) INTO v_has_rows;
            IF v_has_rows THEN
                RAISE EXCEPTION 'future partition % has rows: the new width can''t begin at %', v_partition, v_from
                    USING HINT = format('SELECT * FROM %s shows rows of a clock that is ahead; try again when that time has passed', v_partition);
            END IF;
            EXECUTE format('DROP TABLE %s', v_partition);
        END LOOP;
    END LOOP;
    UPDATE outbox.partition_policy q SET span = set_interval.span, premake = set_interval.premake WHERE q.parent_table = parent;
    PERFORM outbox.make_partitions(parent);
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
    RAISE EXCEPTION 'the width of the partitions of % can''t be changed now: a transaction is using the table', parent
        USING HINT = 'try again; pillarbox doctor lists long transactions';
END
$body$;
COMMENT ON FUNCTION outbox.set_interval IS
    'change the width of future partitions of a table and its followers: empty ones are replaced, the others are kept until their retention is over';
