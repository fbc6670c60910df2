-- Owner part: the policy, the daily partitions, and their state.

CREATE TABLE outbox.partition_policy (
    parent_table text     NOT NULL,
    control      text     NOT NULL,
    template     text     NOT NULL,
    span         interval NOT NULL DEFAULT '1 day',
    retention    interval NOT NULL,
    minimum      interval,
    premake      integer  NOT NULL DEFAULT 7,
    follows      text,
    unsettled    text,
    gate         text,
    keep_table   boolean  NOT NULL DEFAULT false,
    CONSTRAINT partition_policy_pkey PRIMARY KEY (parent_table),
    CONSTRAINT followed_in_all UNIQUE (parent_table, span, retention, premake, keep_table),
    -- Followers have their leader's policy, so that none of its rows is ever without the rows that record its outcome.
    CONSTRAINT kept_as_the_table_that_it_follows FOREIGN KEY (follows, span, retention, premake, keep_table)
        REFERENCES outbox.partition_policy (parent_table, span, retention, premake, keep_table) ON UPDATE CASCADE,
    CONSTRAINT follows_another CHECK (follows <> parent_table),
    -- A follower's partition is held by the one that it follows, and by nothing else.
    CONSTRAINT held_in_one_way CHECK (num_nonnulls(follows, unsettled, gate) <= 1),
    CONSTRAINT minimum_of_leaders_only CHECK (follows IS NULL OR minimum IS NULL),
    CONSTRAINT retention_at_least_a_day CHECK (retention >= interval '1 day'),
    CONSTRAINT retention_at_most_a_hundred_years CHECK (retention <= interval '36500 days'),
    CONSTRAINT retention_not_below_minimum CHECK (retention >= minimum),
    CONSTRAINT premake_at_least_three CHECK (premake >= 3),
    CONSTRAINT premake_at_least_a_day CHECK (premake * span >= interval '1 day'),
    CONSTRAINT span_hourly_daily_or_weekly CHECK (span IN (interval '1 hour', interval '1 day', interval '7 days'))
);
COMMENT ON TABLE outbox.partition_policy IS 'how long rows are kept and how many future partitions exist; the next upkeep applies changes';
COMMENT ON COLUMN outbox.partition_policy.control IS 'the partition key column';
COMMENT ON COLUMN outbox.partition_policy.span IS 'the width of future partitions; change it with outbox.set_interval';
COMMENT ON COLUMN outbox.partition_policy.retention IS 'a partition is dropped when all its rows are older than this';
COMMENT ON COLUMN outbox.partition_policy.minimum IS
    'the shortest retention allowed: the longest time after which a message can still reach its consumer; null: no minimum';
COMMENT ON COLUMN outbox.partition_policy.premake IS 'number of future partitions';
COMMENT ON COLUMN outbox.partition_policy.follows IS
    'the table whose rows this one''s rows are about: it has the policy of that table; its partitions are made with those, and dropped after them';
COMMENT ON COLUMN outbox.partition_policy.unsettled IS
    'SQL condition: a partition with such a row is never dropped; an index should answer it';
COMMENT ON COLUMN outbox.partition_policy.gate IS
    'instead of a condition, a function (partition regclass, starts_at timestamptz, ends_at timestamptz, at_most integer) that returns such rows';
COMMENT ON COLUMN outbox.partition_policy.keep_table IS
    'whether an expired partition is kept as an ordinary table after its detach, ready to be archived, instead of being dropped';

INSERT INTO outbox.partition_policy (parent_table, control, template, retention, unsettled, gate) VALUES
    ('outbox.message',     'created_at', 'outbox.message_template',     '7 days',  NULL, 'outbox.unsettled_messages'),
    ('outbox.dead_letter', 'created_at', 'outbox.dead_letter_template', '30 days', 'status = ''PENDING''', NULL),
    ('inbox.receipt',      'message_at', 'inbox.receipt_template',      '14 days', NULL, NULL),
    ('inbox.dead_letter',  'created_at', 'inbox.dead_letter_template',  '30 days', 'status = ''PENDING''', NULL),
    -- Without a worker, a job that is to be cancelled waits for its message, which may never arrive.
    ('inbox.job',          'message_at', 'inbox.job_template',          '14 days',
     'finished_at IS NULL AND NOT (state = ''waiting'' AND coalesce(lease_until, ''-infinity'') < now())', NULL),
    ('inbox.suspect',      'message_at', 'inbox.suspect_template',      '14 days', NULL, NULL);
INSERT INTO outbox.partition_policy (parent_table, control, template, retention, follows) VALUES
    ('outbox.deferral',   'created_at', 'outbox.deferral_template',   '7 days', 'outbox.message'),
    ('outbox.position',   'created_at', 'outbox.position_template',   '7 days', 'outbox.message');
-- The defaults: 6 days of delay, then 8 retries of 5 minutes by the relay, and by the consumer.
UPDATE outbox.partition_policy SET minimum = '6 days 80 minutes' WHERE parent_table IN ('inbox.receipt', 'inbox.job');

-- A partitioned table has no storage parameters: pg_partman copies them from its template.
EXECUTE EACH
SELECT format('CREATE TABLE %s (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS)%s', p.template, p.parent_table, ' WITH (' || s.settings || ')')
  FROM outbox.partition_policy p
 CROSS JOIN LATERAL (
       SELECT CASE split_part(p.parent_table, '.', 2)
              WHEN 'dead_letter' THEN NULL
              -- Rows are never updated: freeze them early instead of all at once before a wraparound.
              WHEN 'receipt' THEN 'autovacuum_vacuum_insert_scale_factor = 0.1'
              WHEN 'job' THEN 'fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02'
              -- Rows are short-lived.
              WHEN 'suspect' THEN 'autovacuum_vacuum_scale_factor = 0.02'
              -- Rows are only inserted, so vacuum finds nothing dead: it marks new pages all-visible, for
              -- index-only scans. It comes often, so that it reaches pages before the next checkpoint, and
              -- doesn't freeze early: rows are dropped before they need it, and freezing a page that was
              -- checkpointed writes all of it to the WAL (340 bytes for a message of 300, instead of 3).
              ELSE 'autovacuum_vacuum_insert_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05' END
       ) AS s (settings);
EXECUTE EACH
SELECT format('COMMENT ON TABLE %s IS %L', p.template, 'storage parameters for new partitions of ' || p.parent_table)
  FROM outbox.partition_policy p;

CREATE TABLE outbox.upkeep (
    is_it         boolean     NOT NULL DEFAULT true,
    awaited_at    timestamptz NOT NULL DEFAULT now(),
    succeeded_at  timestamptz,
    accepted_at   timestamptz,
    detached_at   timestamptz,
    longest_pause interval    NOT NULL DEFAULT '3 days',
    CONSTRAINT upkeep_pkey PRIMARY KEY (is_it),
    CONSTRAINT one_row CHECK (is_it),
    CONSTRAINT pause_at_least_three_hours CHECK (longest_pause >= interval '3 hours')
);
INSERT INTO outbox.upkeep DEFAULT VALUES;
COMMENT ON TABLE outbox.upkeep IS 'when the upkeep last succeeded, whatever drives it: one row, written by outbox.maintain()';
COMMENT ON COLUMN outbox.upkeep.awaited_at IS 'when the tables were created';
COMMENT ON COLUMN outbox.upkeep.succeeded_at IS 'when it last completed; null: never';
COMMENT ON COLUMN outbox.upkeep.accepted_at IS 'when outbox.accept_clock() was called; null: not since the last success';
COMMENT ON COLUMN outbox.upkeep.detached_at IS 'when pg_cron or pillarbox maintain last looked for partitions to detach; null: never';
COMMENT ON COLUMN outbox.upkeep.longest_pause IS
    'after a longer pause the clock isn''t trusted: nothing is dropped until outbox.accept_clock() is called';

CREATE TABLE outbox.upkeep_failure (
    step         text        NOT NULL,
    object       text        NOT NULL,
    parent_table text,
    failed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    failure      text        NOT NULL,
    remedy       text,
    CONSTRAINT upkeep_failure_pkey PRIMARY KEY (step, object)
);
COMMENT ON TABLE outbox.upkeep_failure IS
    'what failed in the last upkeep: a row for each step of a table or partition, until the step succeeds or is no longer due';
COMMENT ON COLUMN outbox.upkeep_failure.object IS 'the table or partition; empty: the upkeep as a whole';
COMMENT ON COLUMN outbox.upkeep_failure.failure IS 'the error, with the object in the way if the catalog shows it';
COMMENT ON COLUMN outbox.upkeep_failure.remedy IS 'SQL or a command that removes the obstacle; null: unknown';

-- From the catalog, since pg_partman replaces the SQLSTATE of errors.
CREATE FUNCTION outbox.in_the_way(step text, parent text, object text, state text, context text)
RETURNS TABLE (obstacle text, remedy text)
LANGUAGE sql STABLE {pinned}
SET quote_all_identifiers = off
BEGIN ATOMIC
    WITH it AS (
        SELECT c.oid, c.reltype, y.typarray, c.relowner, n.nspname, o.relowner AS owner, o.oid AS parent
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_type y ON y.oid = c.reltype
          JOIN pg_class o ON o.oid = to_regclass(in_the_way.parent)
         WHERE c.oid = coalesce(to_regclass(in_the_way.object), to_regclass(in_the_way.parent))
    )
    SELECT format('there is no table %s', in_the_way.parent) AS obstacle,
           '/* restore it, or create it as pillarbox migrate --sql prints it */' AS remedy
     WHERE in_the_way.parent IS NOT NULL AND to_regclass(in_the_way.parent) IS NULL
    UNION ALL
    (SELECT DISTINCT format('%s %s', i.type, i.identity),
           CASE WHEN i.type IN ('view', 'materialized view', 'function', 'procedure', 'rule', 'trigger', 'policy')
                THEN format('DROP %s %s; /* or let it read the table instead */', upper(i.type), i.identity)
                ELSE '/* drop or change what is in the way */' END
      FROM it
      JOIN pg_depend d ON d.deptype = 'n' AND (d.refclassid = 'pg_class'::regclass AND d.refobjid = it.oid
                                               OR d.refclassid = 'pg_type'::regclass AND d.refobjid IN (it.reltype, it.typarray))
      LEFT JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid AND r.rulename = '_RETURN'
     CROSS JOIN LATERAL pg_identify_object(CASE WHEN r.oid IS NULL THEN d.classid ELSE 'pg_class'::regclass END,
                                           coalesce(r.ev_class, d.objid), d.objsubid) AS i
     WHERE in_the_way.step = 'drop' AND d.classid <> 'pg_constraint'::regclass)
    UNION ALL
    SELECT format('foreign key %I of %s', q.conname, q.conrelid::regclass),
           format('ALTER TABLE %s DROP CONSTRAINT %I;', q.conrelid::regclass, q.conname)
      FROM it JOIN pg_constraint q ON q.contype = 'f' AND q.conparentid = 0 AND q.confrelid IN (it.oid, it.parent)
     WHERE in_the_way.step IN ('drop', 'detach', 'finalize')
    UNION ALL
    SELECT format('it belongs to %s', it.relowner::regrole), format('ALTER TABLE %s OWNER TO %s;', it.oid::regclass, it.owner::regrole)
      FROM it WHERE it.relowner <> it.owner
    UNION ALL
    SELECT format('%s lacks CREATE on the schema %I', it.owner::regrole, it.nspname),
           format('GRANT CREATE ON SCHEMA %I TO %s;', it.nspname, it.owner::regrole)
      FROM it WHERE NOT has_schema_privilege(it.owner, it.nspname, 'CREATE')
    UNION ALL
    (SELECT DISTINCT format('session %s of role %s (application %s)', a.pid, a.usename, coalesce(nullif(a.application_name, ''), '?')),
           format('SELECT pg_terminate_backend(%s); /* or wait until its transaction ends */', a.pid)
      FROM it JOIN pg_locks l ON l.relation IN (it.oid, it.parent) AND l.granted AND l.pid <> pg_backend_pid()
      JOIN pg_stat_activity a ON a.pid = l.pid AND a.datname = current_database()
     WHERE in_the_way.state IN ('55P03', '40P01')
       AND (in_the_way.step <> 'premake' OR l.mode NOT IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock'))
     ORDER BY 1 LIMIT 5)
    UNION ALL
    SELECT format('statement_timeout of role %I is %s', session_user, current_setting('statement_timeout')),
           format('ALTER ROLE %I IN DATABASE %I SET statement_timeout = 0;', session_user, current_database())
     WHERE in_the_way.state = '57014' AND current_setting('statement_timeout') <> '0'
    UNION ALL
    SELECT format('event trigger %I', e.evtname), format('ALTER EVENT TRIGGER %I DISABLE; /* or let its function spare the owner of outbox.message */', e.evtname)
      FROM pg_event_trigger e WHERE e.evtenabled <> 'D' AND position(' ' || e.evtfoid::regprocedure::text IN in_the_way.context) > 0;
END;
COMMENT ON FUNCTION outbox.in_the_way IS 'obstacles to a step of the upkeep, as far as the catalog shows them, with the remedies';

CREATE FUNCTION outbox.note_failure(failure text, step text DEFAULT 'upkeep', parent text DEFAULT NULL, object text DEFAULT NULL,
                                    state text DEFAULT '', context text DEFAULT '') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER {pinned}
AS $body$
DECLARE
    v_object text := coalesce(object, parent, '');
    v_failure text := outbox.without_row(failure, state);
    v_obstacles text;
    v_remedies text;
BEGIN
    SELECT string_agg(w.obstacle, ', '), string_agg(w.remedy, ' ') INTO v_obstacles, v_remedies
      FROM outbox.in_the_way(step, parent, object, CASE WHEN failure ~ 'lock timeout' THEN '55P03' ELSE state END, failure || context) w;
    INSERT INTO outbox.upkeep_failure AS f (step, object, parent_table, failure, remedy)
    VALUES (step, v_object, parent,
            CASE WHEN v_object = '' THEN '' ELSE format('%s of %s: ', step, v_object) END || v_failure || coalesce('; in the way: ' || v_obstacles, ''),
            v_remedies)
        ON CONFLICT ON CONSTRAINT upkeep_failure_pkey DO UPDATE
        SET failed_at = excluded.failed_at, failure = excluded.failure, remedy = excluded.remedy;
END
$body$;
COMMENT ON FUNCTION outbox.note_failure IS 'record a failed step of the upkeep, with its obstacle, without changing the last success';

CREATE FUNCTION outbox.accept_clock() RETURNS void
LANGUAGE sql SECURITY DEFINER {pinned}
BEGIN ATOMIC
    INSERT INTO outbox.upkeep AS u (accepted_at) VALUES (clock_timestamp())
        ON CONFLICT (is_it) DO UPDATE SET accepted_at = EXCLUDED.accepted_at;
END;
COMMENT ON FUNCTION outbox.accept_clock IS 'confirm that the server''s clock is right: the next upkeep drops what has expired';

-- As in Python's pillarbox.outbox.errors: the message of a data exception quotes the value. A message that contains
-- another error may also have its DETAIL or CONTEXT.
CREATE FUNCTION outbox.without_row(message text, state text) RETURNS text
LANGUAGE sql IMMUTABLE {pinned}
BEGIN ATOMIC
    SELECT regexp_replace(CASE WHEN starts_with(state, '22') THEN regexp_replace(message, '["«»„“‹].*["»«“”›]', '"…"') ELSE message END,
                          '[[:space:]]*' || chr(10) || '[[:space:]]*(DETAIL|CONTEXT|LINE [0-9]+):[[:space:]].*$', '');
END;
COMMENT ON FUNCTION outbox.without_row IS 'an error''s message, without values of rows';

-- The clock decides what is dropped. Only the last success shows whether it can be trusted.
CREATE FUNCTION outbox.clock_problem() RETURNS text
LANGUAGE sql STABLE {pinned}
{utc}
BEGIN ATOMIC
    SELECT CASE
           WHEN l.moment > now() + interval '5 minutes' THEN
               format('the server''s clock says %s, but the last upkeep ran at %s: the clock was ahead then, or is behind now',
                      to_char(now(), 'YYYY-MM-DD HH24:MI'), to_char(l.moment, 'YYYY-MM-DD HH24:MI'))
           WHEN l.moment < now() - l.longest_pause THEN
               format('the server''s clock says %s, but the last upkeep ran at %s, longer ago than outbox.upkeep.longest_pause, %s:'
                      ' the upkeep has been off that long, or the clock jumped ahead',
                      to_char(now(), 'YYYY-MM-DD HH24:MI'), to_char(l.moment, 'YYYY-MM-DD HH24:MI'), l.longest_pause)
           END
      FROM (SELECT coalesce(u.accepted_at, u.succeeded_at, u.awaited_at), u.longest_pause FROM outbox.upkeep u)
           AS l (moment, longest_pause);
END;
COMMENT ON FUNCTION outbox.clock_problem IS
    'why the clock can''t be trusted; null if the time since the last upkeep is plausible';

CREATE TABLE outbox.retiring_partition (
    partition    text        NOT NULL,
    parent_table text        NOT NULL,
    starts_at    timestamptz NOT NULL,
    ends_at      timestamptz NOT NULL,
    planned_at   timestamptz NOT NULL DEFAULT now(),
    detach_by    text        NOT NULL,
    CONSTRAINT retiring_partition_pkey PRIMARY KEY (partition)
);
COMMENT ON TABLE outbox.retiring_partition IS
    'partitions that are about to be detached: recorded before it, and until their drop, so that no detached one is lost';
COMMENT ON COLUMN outbox.retiring_partition.detach_by IS 'what detaches it: pg_cron or pillarbox maintain';

CREATE TABLE outbox.dropped_partition (
    parent_table text        NOT NULL,
    starts_at    timestamptz NOT NULL,
    ends_at      timestamptz NOT NULL,
    dropped_at   timestamptz NOT NULL DEFAULT now(),
    newest       timestamptz,
    CONSTRAINT dropped_partition_pkey PRIMARY KEY (parent_table, starts_at, ends_at)
);
COMMENT ON TABLE outbox.dropped_partition IS
    'partitions that the upkeep has dropped: if one is created again, messages in it count as too old';
COMMENT ON COLUMN outbox.dropped_partition.newest IS
    'for receipts, jobs and suspects: the newest message_at dropped; null: the partition was empty';

CREATE FUNCTION outbox.begin_of(span interval, moment timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE {pinned}
RETURN date_trunc(CASE span WHEN interval '1 hour' THEN 'hour' WHEN interval '1 day' THEN 'day' ELSE 'week' END, moment, 'UTC');
COMMENT ON FUNCTION outbox.begin_of IS 'the start of the hour, day or week of a time, in UTC';

-- The name of a partition of any width, read by the format of another width, gives the start of its day:
-- pg_partman 4 orders partitions by that.
CREATE FUNCTION outbox.name_format(span interval) RETURNS text
LANGUAGE sql IMMUTABLE {pinned}
RETURN CASE WHEN span < interval '1 day' THEN 'YYYYMMDD_HH24MISS' ELSE 'YYYYMMDD' END;
COMMENT ON FUNCTION outbox.name_format IS 'the format of the names of partitions of this width';

CREATE FUNCTION outbox.partition_name(parent text, starts_at timestamptz) RETURNS text
LANGUAGE sql STABLE {pinned}
SET timezone = 'UTC'
BEGIN ATOMIC
    SELECT format('%I.%I', n.nspname, c.relname || '_p' || to_char(starts_at, outbox.name_format(p.span)))
      FROM outbox.partition_policy p
      JOIN pg_class c ON c.oid = p.parent_table::regclass
      JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE p.parent_table = parent;
END;
COMMENT ON FUNCTION outbox.partition_name IS 'the name of the partition of a table that begins at this time';

-- Created again after its drop, because the clock had jumped: messages with dropped receipts must not count as new.
CREATE FUNCTION outbox.keep_forgotten(parent text) RETURNS void
LANGUAGE plpgsql {pinned}
AS $body$
DECLARE
    v_has_older boolean;
    x record;
BEGIN
    FOR x IN
        SELECT q.partition, max(d.newest) AS newest
          FROM outbox.partition_policy p
          JOIN outbox.dropped_partition d ON d.parent_table = p.parent_table AND d.newest IS NOT NULL AND d.ends_at >= now() - p.retention
         CROSS JOIN LATERAL outbox.partitions(parent) q
         WHERE p.parent_table = parent AND p.control = 'message_at'
           AND d.starts_at < q.ends_at AND d.ends_at > q.starts_at
           AND q.ends_at >= now() - p.retention AND NOT q.detach_pending
         GROUP BY q.partition
    LOOP
        CONTINUE WHEN EXISTS (
            SELECT FROM pg_constraint c
             WHERE c.conrelid = x.partition AND c.conname = 'not_forgotten_' || (extract(epoch FROM x.newest) * 1000)::bigint);
        EXECUTE format('SELECT EXISTS (SELECT FROM %s WHERE message_at <= %L)', x.partition, x.newest) INTO v_has_older;
        -- A partition with rows was attached again: its receipts exist.
        CONTINUE WHEN v_has_older;
        EXECUTE format('ALTER TABLE %s ADD CONSTRAINT %I CHECK (message_at > %L) NOT VALID', x.partition,
                       'not_forgotten_' || (extract(epoch FROM x.newest) * 1000)::bigint, x.newest);
    END LOOP;
END
$body$;
COMMENT ON FUNCTION outbox.keep_forgotten IS 'refuse receipts that a partition which was created again may have held';

-- The one place that creates partitions: by pg_partman if a migration has installed it, which is what
-- outbox.make_with_partman says, else by outbox.make_partition(), as relays and consumers do.
CREATE FUNCTION outbox.make_partitions(parent text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER {pinned}
{utc}  -- pg_partman computes bounds in the session's time zone
SET lock_timeout = '5s'
SET jit = off  -- compilation would take longer than execution
AS $body$
DECLARE
    v_missing timestamptz[];
    v_unmade timestamptz;
BEGIN
    IF EXISTS (SELECT FROM outbox.missing_partitions(parent)) THEN
        -- Another upkeep may be creating them.
        PERFORM pg_advisory_xact_lock(hashtextextended('outbox.make_partitions ' || parent, 0));
        SELECT array_agg(m.starts_at ORDER BY m.starts_at) INTO v_missing FROM outbox.missing_partitions(parent) m;
    END IF;
    IF to_regprocedure('outbox.make_with_partman(text, timestamptz[])') IS NOT NULL THEN
        PERFORM outbox.make_with_partman(parent, v_missing);
    ELSE
        PERFORM outbox.make_partition(parent, m.starts_at)
           FROM unnest(v_missing) AS m (starts_at)
          WHERE to_regclass(outbox.partition_name(parent, m.starts_at)) IS NULL;
    END IF;
    -- Trust the catalog: pg_partman 5.5 turns errors into warnings, and a table may have the name.
    IF v_missing IS NOT NULL THEN
        SELECT min(m.starts_at) INTO v_unmade FROM outbox.missing_partitions(parent) m;
        IF v_unmade IS NOT NULL THEN
            RAISE EXCEPTION 'upkeep of % created no partition that begins at %; if there is a table %, attach, rename or drop it',
                parent, v_unmade, outbox.partition_name(parent, v_unmade);
        END IF;
    END IF;
    PERFORM outbox.keep_forgotten(parent);
    -- In the same transaction: no partition of a leader is ever seen without those of its followers.
    PERFORM outbox.make_partitions(q.parent_table)
       FROM (SELECT f.parent_table FROM outbox.partition_policy f WHERE f.follows = parent ORDER BY 1) q;
END
$body$;
COMMENT ON FUNCTION outbox.make_partitions IS
    'create future partitions of a table and of its followers, and fill gaps';

-- While the clock is behind, now() would let the first upkeep after its correction remove a new receipt.
CREATE FUNCTION outbox.receipt_time() RETURNS timestamptz
LANGUAGE sql STABLE {pinned}
BEGIN ATOMIC
    SELECT greatest(now(), (SELECT u.succeeded_at FROM outbox.upkeep u));
END;
COMMENT ON FUNCTION outbox.receipt_time IS 'the time of a new foreign receipt: now, or that of the last upkeep if the clock is behind it';
ALTER TABLE inbox.foreign_receipt ALTER COLUMN received_at SET DEFAULT outbox.receipt_time();

CREATE FUNCTION outbox.trim_batch(of_table text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER {pinned}
AS $body$
DECLARE
    v_count int := 0;
BEGIN
    IF outbox.clock_problem() IS NOT NULL THEN
        RETURN 0;
    ELSIF of_table = 'inbox.foreign_receipt' THEN
        DELETE FROM inbox.foreign_receipt
         WHERE ctid = ANY (ARRAY(
             SELECT f.ctid FROM inbox.foreign_receipt f
              WHERE f.received_at < now() - (SELECT retention FROM outbox.partition_policy WHERE parent_table = 'inbox.receipt')
              ORDER BY f.received_at LIMIT 1000));
    ELSE
        DELETE FROM outbox.operation
         WHERE id = ANY (ARRAY(SELECT o.id FROM outbox.operation o WHERE o.asked_at < now() - interval '90 days' AND (o.kind <> 'pause' OR o.state <> 'running') ORDER BY o.asked_at LIMIT 1000));
    END IF;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$body$;
COMMENT ON FUNCTION outbox.trim_batch IS
    'delete up to 1,000 foreign receipts past the retention of inbox.receipt, or operations that were started more than 90 days ago; returns how many';
