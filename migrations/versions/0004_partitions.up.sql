-- Owner part: the policy, the daily partitions made with pg_partman, and their state.

SET LOCAL ROLE {owner};

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
    'how late a message can reach its consumer, by your delays and retries: the least retention; null: no minimum';
COMMENT ON COLUMN outbox.partition_policy.premake IS 'number of future partitions';
COMMENT ON COLUMN outbox.partition_policy.follows IS
    'the table whose rows this one''s rows are about: its partitions are made with those of that table, and dropped after them';
COMMENT ON COLUMN outbox.partition_policy.unsettled IS
    'SQL condition: a partition with such a row is never dropped; an index should answer it';
COMMENT ON COLUMN outbox.partition_policy.gate IS
    'instead of a condition, a function (partition regclass, starts_at timestamptz, ends_at timestamptz, at_most integer) that returns such rows';
COMMENT ON COLUMN outbox.partition_policy.keep_table IS
    'whether an expired partition is kept as an ordinary table after its detach, ready to be archived, instead of being dropped';

-- Followers have their leader's policy, so that none of its rows is ever without the rows that record
-- its outcome: a value of their own is rejected, and the leader's values are copied to them.
CREATE FUNCTION outbox.follow_policy() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    v_leader outbox.partition_policy;
    v_refused record;
BEGIN
    SELECT f.parent_table, f.follows INTO v_refused
      FROM written n
      JOIN outbox.partition_policy f ON f.parent_table = n.parent_table
      LEFT JOIN outbox.partition_policy l ON l.parent_table = f.follows AND l.follows IS NULL
     WHERE f.follows IS NOT NULL
       AND (f.span, f.retention, f.premake, f.keep_table) IS DISTINCT FROM (l.span, l.retention, l.premake, l.keep_table)
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% follows %: it is partitioned and kept as that table is', v_refused.parent_table, v_refused.follows
            USING ERRCODE = 'check_violation', HINT = format('set the policy of %s instead', v_refused.follows);
    END IF;
    FOR v_leader IN
        SELECT q.* FROM outbox.partition_policy q JOIN written n ON n.parent_table = q.parent_table
         WHERE EXISTS (SELECT FROM outbox.partition_policy f WHERE f.follows = q.parent_table)
    LOOP
        UPDATE outbox.partition_policy f
           SET span = v_leader.span, retention = v_leader.retention, premake = v_leader.premake, keep_table = v_leader.keep_table
         WHERE f.follows = v_leader.parent_table
           AND (f.span, f.retention, f.premake, f.keep_table)
               IS DISTINCT FROM (v_leader.span, v_leader.retention, v_leader.premake, v_leader.keep_table);
    END LOOP;
    RETURN NULL;
END
$body$;
COMMENT ON FUNCTION outbox.follow_policy IS 'pass a table''s policy on to the tables that follow it, and refuse other values for those';
CREATE TRIGGER partition_policy_inserted AFTER INSERT ON outbox.partition_policy
    REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION outbox.follow_policy();
CREATE TRIGGER partition_policy_updated AFTER UPDATE ON outbox.partition_policy
    REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION outbox.follow_policy();

INSERT INTO outbox.partition_policy (parent_table, control, template, retention, unsettled, gate) VALUES
    ('outbox.message',     'created_at', 'outbox.message_template',     '7 days',  NULL, 'outbox.unsettled_messages'),
    ('outbox.dead_letter', 'created_at', 'outbox.dead_letter_template', '30 days', 'status = ''PENDING''', NULL),
    ('inbox.receipt',      'message_at', 'inbox.receipt_template',      '14 days', NULL, NULL),
    ('inbox.delivery',     'created_at', 'inbox.delivery_template',     '7 days',  NULL, 'inbox.unsettled_deliveries'),
    ('inbox.dead_letter',  'created_at', 'inbox.dead_letter_template',  '30 days', 'status = ''PENDING''', NULL);
INSERT INTO outbox.partition_policy (parent_table, control, template, retention, follows) VALUES
    ('outbox.settlement', 'created_at', 'outbox.settlement_template', '7 days', 'outbox.message'),
    ('outbox.deferral',   'created_at', 'outbox.deferral_template',   '7 days', 'outbox.message'),
    ('outbox.watermark',  'created_at', 'outbox.watermark_template',  '7 days', 'outbox.message'),
    ('inbox.ack',         'created_at', 'inbox.ack_template',         '7 days', 'inbox.delivery'),
    ('inbox.redelivery',  'created_at', 'inbox.redelivery_template',  '7 days', 'inbox.delivery'),
    ('inbox.watermark',   'created_at', 'inbox.watermark_template',   '7 days', 'inbox.delivery');
-- The defaults: 6 days of delay, then 8 retries of 5 minutes by the relay, and by the consumer.
UPDATE outbox.partition_policy SET minimum = '6 days 80 minutes' WHERE parent_table = 'inbox.receipt';

CREATE TABLE outbox.upkeep (
    is_it         boolean     NOT NULL DEFAULT true,
    awaited_at    timestamptz NOT NULL DEFAULT now(),
    succeeded_at  timestamptz,
    accepted_at   timestamptz,
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

-- From the catalog, since pg_partman replaces the SQLSTATE of errors by its own.
CREATE FUNCTION outbox.in_the_way(step text, parent text, object text, state text, context text)
RETURNS TABLE (obstacle text, remedy text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET quote_all_identifiers = off
BEGIN ATOMIC
    WITH it AS (
        SELECT c.oid, c.reltype, y.typarray, c.relowner, n.nspname, o.relowner AS owner, o.oid AS parent
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_type y ON y.oid = c.reltype
          JOIN pg_class o ON o.oid = to_regclass(in_the_way.parent)
         WHERE c.oid = coalesce(to_regclass(in_the_way.object), to_regclass(in_the_way.parent))
    )
    SELECT format('there is no table %s', in_the_way.parent),
           format('/* restore %s, or create it as pillarbox migrate --sql prints it */', in_the_way.parent)
     WHERE in_the_way.parent IS NOT NULL AND to_regclass(in_the_way.parent) IS NULL
    UNION ALL
    (SELECT DISTINCT format('%s %s', i.type, i.identity),
           CASE WHEN i.type IN ('view', 'materialized view', 'function', 'procedure', 'rule', 'trigger', 'policy')
                THEN format('DROP %s %s; /* or let it read %s */', upper(i.type), i.identity, in_the_way.parent)
                ELSE format('/* drop or change %s %s */', i.type, i.identity) END
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
    SELECT format('event trigger %I', e.evtname), format('ALTER EVENT TRIGGER %I DISABLE; /* or let %s spare the owner of outbox.message */', e.evtname, e.evtfoid::regprocedure)
      FROM pg_event_trigger e WHERE e.evtenabled <> 'D' AND position(' ' || e.evtfoid::regprocedure::text IN in_the_way.context) > 0;
END;
COMMENT ON FUNCTION outbox.in_the_way IS 'what keeps a step of the upkeep from succeeding, as far as the catalog shows it, with the remedies';

CREATE FUNCTION outbox.note_failure(failure text, step text DEFAULT 'upkeep', parent text DEFAULT NULL, object text DEFAULT NULL,
                                    state text DEFAULT '', context text DEFAULT '') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
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
COMMENT ON FUNCTION outbox.note_failure IS 'record a step of the upkeep that failed, with what is in its way, without changing the last success';

CREATE FUNCTION outbox.accept_clock() RETURNS void
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    INSERT INTO outbox.upkeep AS u (accepted_at) VALUES (clock_timestamp())
        ON CONFLICT (is_it) DO UPDATE SET accepted_at = EXCLUDED.accepted_at;
END;
COMMENT ON FUNCTION outbox.accept_clock IS 'confirm that the server''s clock is right: the next upkeep drops what has expired';

-- As in Python's outbox.errors: the message of a data exception quotes the value. A message that contains
-- another error may also have its DETAIL or CONTEXT.
CREATE FUNCTION outbox.without_row(message text, state text) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT regexp_replace(CASE WHEN starts_with(state, '22') THEN regexp_replace(message, '["«»„“‹].*["»«“”›]', '"…"') ELSE message END,
                          '[[:space:]]*' || chr(10) || '[[:space:]]*(DETAIL|CONTEXT|LINE [0-9]+):[[:space:]].*$', '');
END;
COMMENT ON FUNCTION outbox.without_row IS 'an error''s message, without values of rows';

-- The clock decides what is dropped. Only the last success shows whether it can be trusted.
CREATE FUNCTION outbox.clock_problem() RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, MDY'
SET intervalstyle = 'postgres'
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
    planned_at   timestamptz DEFAULT now(),
    detach_by    text,
    CONSTRAINT retiring_partition_pkey PRIMARY KEY (partition)
);
COMMENT ON TABLE outbox.retiring_partition IS
    'expired partitions: recorded before their detach and until their drop, so that no detached one is lost';
COMMENT ON COLUMN outbox.retiring_partition.planned_at IS
    'when the upkeep first found it expired; null: it isn''t any more, but a planned job may still detach it';
COMMENT ON COLUMN outbox.retiring_partition.detach_by IS
    'what will detach it: pg_cron, pillarbox maintain or outbox.maintain(); null: nothing yet, so one that is detached was detached by hand';

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

-- Reads the catalog: names differ between pg_partman 4 and 5.
CREATE FUNCTION outbox.partitions(parent text)
RETURNS TABLE (partition regclass, starts_at timestamptz, ends_at timestamptz, is_default boolean, detach_pending boolean, owner oid)
LANGUAGE sql STABLE ROWS 100
SET search_path = pg_catalog, pg_temp
SET datestyle = 'ISO, MDY'  -- other styles abbreviate the time zone, which is ambiguous
BEGIN ATOMIC
    SELECT i.inhrelid::regclass,
           nullif(split_part(split_part(b.bound, ' TO (', 1), '''', 2), '')::timestamptz,
           nullif(split_part(split_part(b.bound, ' TO (', 2), '''', 2), '')::timestamptz,
           b.bound = 'DEFAULT', i.inhdetachpending, b.owner
      FROM pg_inherits i
     CROSS JOIN LATERAL (
           SELECT c.relowner, pg_get_expr(c.relpartbound, 0) FROM pg_class c WHERE c.oid = i.inhrelid
           OFFSET 0  -- reads pg_class and the bound once per partition
           ) AS b (owner, bound)
     WHERE i.inhparent = to_regclass(parent)
     ORDER BY 2;
END;
COMMENT ON FUNCTION outbox.partitions IS 'the partitions of a table, with their bounds, oldest first';

CREATE FUNCTION outbox.begin_of(span interval, moment timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN date_trunc(CASE span WHEN interval '1 hour' THEN 'hour' WHEN interval '1 day' THEN 'day' ELSE 'week' END, moment, 'UTC');
COMMENT ON FUNCTION outbox.begin_of IS 'the start of the hour, day or week of a time, in UTC';

-- For partman.part_config. The name of a partition of any width, read by the format of another
-- width, gives the start of its day: pg_partman 4 orders partitions by that.
CREATE FUNCTION outbox.name_format(parent text, span interval) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    -- Not outbox.partitions(), which reads all bounds.
    SELECT CASE WHEN EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                              WHERE i.inhparent = to_regclass(parent) AND c.relname ~ '_p\d{4}_\d\d_\d\d')
                THEN CASE WHEN span < interval '1 day' THEN 'YYYY_MM_DD_HH24MI' ELSE 'YYYY_MM_DD' END
                ELSE CASE WHEN span < interval '1 day' THEN 'YYYYMMDD_HH24MISS' ELSE 'YYYYMMDD' END END;
END;
COMMENT ON FUNCTION outbox.name_format IS 'the format of the names that pg_partman gives to partitions of this width';

-- Configures pg_partman for a new table, registers partitions restored from a dump, and restores settings that
-- were changed. pg_partman's own retention is off: pillarbox uses outbox.finish_detached(). If somebody turns it
-- on, retention_keep_table makes pg_partman detach partitions that it would otherwise drop with unsettled rows.
CREATE FUNCTION outbox.adopt_table(parent text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, MDY'
SET intervalstyle = 'postgres'
AS $body$
DECLARE
    p outbox.partition_policy;
    v_major int := (SELECT split_part(extversion, '.', 1)::int FROM pg_extension WHERE extname = 'pg_partman');
    v_default regclass;
BEGIN
    SELECT * INTO STRICT p FROM outbox.partition_policy WHERE parent_table = parent;
    IF NOT EXISTS (SELECT FROM {partman}.part_config c WHERE c.parent_table = parent) THEN
        IF EXISTS (SELECT FROM outbox.partitions(parent)) THEN
            -- create_parent() would fail with "would overlap partition".
            INSERT INTO {partman}.part_config (parent_table, control, partition_type, partition_interval, premake, template_table, datetime_string)
            SELECT parent, p.control, CASE WHEN v_major >= 5 THEN 'range' ELSE 'native' END, p.span::text, p.premake, p.template,
                   outbox.name_format(parent, p.span);
        ELSIF v_major >= 5 THEN
            -- create_parent() exists in every version, its successor create_partition() only since 5.4.
            EXECUTE 'SELECT {partman}.create_parent(p_parent_table := $1, p_control := $2, p_interval := $3, p_type := ''range'','
                    ' p_premake := $4, p_template_table := $5, p_default_table := false, p_jobmon := false)'
              USING p.parent_table, p.control, p.span::text, p.premake, p.template;
        ELSE
            EXECUTE 'SELECT {partman}.create_parent(p_parent_table := $1, p_control := $2, p_interval := $3, p_type := ''native'','
                    ' p_premake := $4, p_template_table := $5, p_jobmon := false)'
              USING p.parent_table, p.control, p.span::text, p.premake, p.template;
            -- 4.x always creates a DEFAULT partition, which rules out DETACH CONCURRENTLY and hides gaps.
            SELECT x.partition INTO v_default FROM outbox.partitions(parent) x WHERE x.is_default;
            IF v_default IS NOT NULL THEN
                EXECUTE format('DROP TABLE %s', v_default);
            END IF;
        END IF;
    END IF;
    UPDATE {partman}.part_config c
       SET control = p.control, epoch = 'none', partition_interval = p.span::text, premake = p.premake,
           datetime_string = outbox.name_format(parent, p.span), template_table = p.template,
           infinite_time_partitions = true, undo_in_progress = false, automatic_maintenance = 'off',
           retention = NULL, retention_schema = NULL, retention_keep_table = true, retention_keep_index = true,
           constraint_cols = NULL, inherit_privileges = false, ignore_default_data = true, jobmon = false
     WHERE c.parent_table = parent;
END
$body$;
COMMENT ON FUNCTION outbox.adopt_table IS 'configure pg_partman for a table of the policy; safe to repeat';

-- Created again after its drop, because the clock had jumped: dropped receipts must not count as new.
CREATE FUNCTION outbox.keep_forgotten(parent text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, MDY'
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

CREATE FUNCTION outbox.make_partitions(parent text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'  -- pg_partman computes bounds in the session's time zone
SET datestyle = 'ISO, MDY'
SET intervalstyle = 'postgres'
SET lock_timeout = '5s'
SET jit = off  -- compilation would take longer than execution
AS $body$
DECLARE
    v_before int;
    v_missing timestamptz[];
    v_unmade timestamptz;
BEGIN
    SELECT count(*) INTO v_before FROM pg_inherits WHERE inhparent = parent::regclass;
    PERFORM outbox.adopt_table(parent);
    -- Trust the catalog, not run_maintenance(): 4.7 creates one more after noon, 5.0 creates none for
    -- an empty table, 5.5 turns errors into warnings, and no version fills gaps.
    SELECT array_agg(m.starts_at ORDER BY m.starts_at) INTO v_missing FROM outbox.missing_partitions(parent) m;
    IF v_missing IS NOT NULL THEN
        -- Another upkeep may be creating them.
        BEGIN
            PERFORM pg_advisory_xact_lock(hashtextextended('outbox.make_partitions ' || parent, 0));
        EXCEPTION WHEN lock_not_available THEN
            RAISE EXCEPTION 'timed out waiting for the lock that creates partitions: pillarbox doctor names a session that has no right to hold it'
                USING ERRCODE = 'lock_not_available';
        END;
        SELECT array_agg(m.starts_at ORDER BY m.starts_at) INTO v_missing FROM outbox.missing_partitions(parent) m;
    END IF;
    IF v_missing IS NOT NULL THEN
        PERFORM {partman}.create_partition_time(p_parent_table := parent, p_partition_times := v_missing);
        SELECT min(m.starts_at) INTO v_unmade FROM outbox.missing_partitions(parent) m;
        IF v_unmade IS NOT NULL THEN
            RAISE EXCEPTION 'upkeep of % created no partition that begins at %; if there is a table %, attach, rename or drop it', parent, v_unmade,
                (SELECT parent || '_p' || to_char(v_unmade, outbox.name_format(parent, p.span)) FROM outbox.partition_policy p WHERE p.parent_table = parent);
        END IF;
    END IF;
    PERFORM outbox.keep_forgotten(parent);
    -- In the same transaction: no partition of a leader is ever seen without those of its followers.
    PERFORM outbox.make_partitions(q.parent_table)
       FROM (SELECT f.parent_table FROM outbox.partition_policy f WHERE f.follows = parent ORDER BY 1) q;
    RETURN (SELECT count(*) FROM pg_inherits WHERE inhparent = parent::regclass) - v_before;
END
$body$;
COMMENT ON FUNCTION outbox.make_partitions IS
    'create future partitions of a table and of its followers, and fill gaps; returns how many were created for the table itself';

-- While the clock is behind, now() would let the first upkeep after its correction remove a new receipt.
CREATE FUNCTION outbox.receipt_time() RETURNS timestamptz
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT greatest(now(), (SELECT u.succeeded_at FROM outbox.upkeep u));
END;
COMMENT ON FUNCTION outbox.receipt_time IS 'the time of a new foreign receipt: now, or that of the last upkeep if the clock is behind it';
ALTER TABLE inbox.foreign_receipt ALTER COLUMN received_at SET DEFAULT outbox.receipt_time();

CREATE FUNCTION outbox.trim_foreign_receipts_batch() RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    v_count int;
BEGIN
    IF outbox.clock_problem() IS NOT NULL THEN
        RETURN 0;
    END IF;
    DELETE FROM inbox.foreign_receipt
     WHERE ctid = ANY (ARRAY(
         SELECT f.ctid FROM inbox.foreign_receipt f
          WHERE f.received_at < now() - (SELECT retention FROM outbox.partition_policy WHERE parent_table = 'inbox.receipt')
          ORDER BY f.received_at LIMIT 1000));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$body$;

COMMENT ON FUNCTION outbox.trim_foreign_receipts_batch IS
    'delete up to 1,000 foreign receipts past the retention of inbox.receipt; returns how many';

RESET ROLE;
