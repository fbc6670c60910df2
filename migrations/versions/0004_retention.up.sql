-- Owner part: retention without stalling writers: what may be dropped, its detach, and its drop.

SET LOCAL ROLE {owner};

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

CREATE TABLE outbox.kept_partition (
    partition    text        NOT NULL,
    parent_table text        NOT NULL,
    starts_at    timestamptz NOT NULL,
    ends_at      timestamptz NOT NULL,
    kept_at      timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT kept_partition_pkey PRIMARY KEY (partition)
);
COMMENT ON TABLE outbox.kept_partition IS
    'detached partitions whose tables the policy keeps (keep_table): move or drop them as you like; the upkeep ignores them';

-- The function runs as its own owner, which is granted SELECT on that one table.
CREATE FUNCTION outbox.archive_problem(function_name text, OUT problem text, OUT call text, OUT archivist text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    v_parts text[];
    v_signature text;
    v_owner name := (SELECT pg_get_userbyid(c.relowner) FROM pg_class c WHERE c.oid = 'outbox.message'::regclass);
    f pg_proc;
BEGIN
    BEGIN
        v_parts := parse_ident(function_name);
    EXCEPTION WHEN invalid_parameter_value THEN
        NULL;
    END;
    IF cardinality(v_parts) IS DISTINCT FROM 2 THEN
        problem := format('archive function %L: write it as schema.function, without arguments', function_name);
        RETURN;
    END IF;
    call := format('%I.%I', v_parts[1], v_parts[2]);
    v_signature := call || '(text, text, timestamptz, timestamptz)';
    -- to_regprocedure() would fail without USAGE on the schema.
    SELECT p.* INTO f FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
     WHERE n.nspname = v_parts[1] AND p.proname = v_parts[2] AND p.prokind = 'f'
       AND p.proargtypes::text = format('%s %s %s %s', 'text'::regtype::oid, 'text'::regtype::oid,
                                        'timestamptz'::regtype::oid, 'timestamptz'::regtype::oid);
    archivist := pg_get_userbyid(f.proowner);
    problem := CASE
        WHEN f.oid IS NULL THEN format('there is no function %s: create it', v_signature)
        WHEN NOT f.prosecdef THEN
            format('%s would run as %s, who owns all messages: ALTER FUNCTION %s SECURITY DEFINER', v_signature, v_owner, v_signature)
        WHEN NOT EXISTS (SELECT FROM unnest(f.proconfig) AS c WHERE c LIKE 'search\_path=%') THEN
            format('%s has no search_path of its own: ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', v_signature, v_signature)
        WHEN NOT has_schema_privilege(v_owner, v_parts[1], 'USAGE') OR NOT has_function_privilege(v_owner, f.oid, 'EXECUTE') THEN
            format('%s may not call %s: GRANT USAGE ON SCHEMA %I TO %I; GRANT EXECUTE ON FUNCTION %s TO %I',
                   v_owner, v_signature, v_parts[1], v_owner, v_signature, v_owner)
        WHEN NOT has_schema_privilege(archivist, 'outbox', 'USAGE') OR NOT has_schema_privilege(archivist, 'inbox', 'USAGE') THEN
            format('%s, as whom %s runs, can''t reach our tables: GRANT USAGE ON SCHEMA outbox, inbox TO %I', archivist, v_signature, archivist)
        END;
END
$body$;
COMMENT ON FUNCTION outbox.archive_problem IS
    'why a function can''t archive partitions, with the remedy (null: it can); its signature; and the role that it runs as';

CREATE FUNCTION outbox.detach_under_way() RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    -- DETACH waits for the virtualxid of each transaction that uses the table. It holds no lock
    -- meanwhile, and its query text is hidden from other roles. Other commands that wait like this,
    -- such as CREATE INDEX CONCURRENTLY, can't be told apart.
    SELECT EXISTS (
        SELECT FROM pg_stat_activity a JOIN pg_locks l ON l.pid = a.pid
         WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
           AND l.locktype = 'virtualxid' AND NOT l.granted);
END;
COMMENT ON FUNCTION outbox.detach_under_way IS
    'whether a session of this database is waiting for transactions, as DETACH PARTITION … CONCURRENTLY does';

CREATE FUNCTION outbox.may_finalize(partition regclass) RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    -- FINALIZE would overtake a detach that is still waiting. And it locks the partition while it
    -- waits for all older snapshots: a transaction that still sees the partition attached could
    -- then read it, and one of the two would be aborted by a deadlock.
    SELECT NOT outbox.detach_under_way() AND NOT EXISTS (
        SELECT FROM pg_inherits i, pg_stat_activity a
         WHERE i.inhrelid = may_finalize.partition
           AND a.datname = current_database() AND a.pid <> pg_backend_pid()
           AND age(a.backend_xmin) >= age(i.xmin));
END;
COMMENT ON FUNCTION outbox.may_finalize IS 'whether an interrupted detach can be finalized without blocking other sessions';

CREATE FUNCTION outbox.count_unsettled(parent text, partition regclass) RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off  -- stale statistics can make a sequential scan look cheap
SET jit = off  -- the estimated cost may be high enough for it
AS $body$
DECLARE
    v_unsettled text := (SELECT p.unsettled FROM outbox.partition_policy p WHERE p.parent_table = parent);
    v_count bigint := 0;
BEGIN
    IF v_unsettled IS NOT NULL THEN
        EXECUTE format('SELECT count(*) FROM (SELECT FROM %s WHERE %s LIMIT 1000) AS u', partition, v_unsettled) INTO v_count;
    END IF;
    RETURN v_count;
EXCEPTION WHEN syntax_error_or_access_rule_violation OR lock_not_available THEN
    RETURN NULL;
END
$body$;
COMMENT ON FUNCTION outbox.count_unsettled IS
    'the unsettled rows of a partition, counted up to 1,000; null if the condition fails or the owner lacks privileges';

CREATE FUNCTION outbox.upkeep_plan(parent text DEFAULT NULL)
RETURNS TABLE (step text, parent_table text, partition text, starts_at timestamptz, ends_at timestamptz,
               unsettled bigint, reason text, statement text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, MDY'
SET intervalstyle = 'postgres'
SET jit = off
AS $body$
DECLARE
    p outbox.partition_policy;
    v_clock text := outbox.clock_problem();
BEGIN
    FOR p IN
        SELECT q.* FROM outbox.partition_policy q
         WHERE q.parent_table = coalesce(parent, q.parent_table) ORDER BY q.parent_table
    LOOP
        parent_table := p.parent_table;
        step := 'make'; partition := NULL; unsettled := NULL;
        FOR starts_at, ends_at IN
            SELECT m.starts_at, m.ends_at FROM outbox.missing_partitions(p.parent_table) m
        LOOP
            reason := CASE WHEN v_clock IS NULL THEN format('no partition for these rows; the policy requires %s future partitions', p.premake)
                           ELSE 'no partition for these rows of today or tomorrow' END;
            statement := format('SELECT outbox.make_partitions(%L)', p.parent_table);
            RETURN NEXT;
        END LOOP;
        FOR partition, starts_at, ends_at, unsettled IN
            SELECT r.partition, r.starts_at, r.ends_at, outbox.count_unsettled(p.parent_table, c.oid)
              FROM outbox.retiring_partition r JOIN pg_class c ON c.oid = to_regclass(r.partition)
             WHERE r.parent_table = p.parent_table AND r.detach_by IS NOT NULL AND NOT c.relispartition ORDER BY r.starts_at
        LOOP
            IF unsettled = 0 AND ends_at < now() - p.retention AND v_clock IS NOT NULL THEN
                step := 'refuse';
                reason := v_clock;
                statement := 'SELECT outbox.accept_clock()';
            ELSIF unsettled = 0 AND ends_at < now() - p.retention THEN
                step := CASE WHEN p.keep_table THEN 'keep' ELSE 'drop' END;
                reason := 'detached, and nothing in it is unsettled' || CASE WHEN p.keep_table THEN '; the policy keeps the table'
                              ELSE coalesce('; ' || p.archive || ' archives it first', '') END;
                statement := CASE WHEN p.keep_table OR p.archive IS NOT NULL
                                  THEN format('SELECT * FROM outbox.finish_detached(%L)', p.parent_table)
                                  ELSE format('DROP TABLE %s', partition) END;
            ELSE
                step := 'attach';
                reason := CASE WHEN unsettled = 0 THEN format('detached, but the retention of %s keeps it', p.retention)
                               ELSE 'detached, but with an unsettled row that appeared meanwhile' END;
                statement := format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                                    p.parent_table, partition, starts_at, ends_at);
            END IF;
            RETURN NEXT;
        END LOOP;
        FOR step, partition, starts_at, ends_at, unsettled IN
            SELECT CASE WHEN x.detach_pending THEN 'finalize' WHEN u.count = 0 THEN 'detach' ELSE 'hold' END,
                   x.partition::text, x.starts_at, x.ends_at, u.count
              FROM outbox.partitions(p.parent_table) x
             CROSS JOIN LATERAL (
                   -- FINALIZE may hold a lock on it while it waits.
                   SELECT CASE WHEN NOT x.detach_pending THEN outbox.count_unsettled(p.parent_table, x.partition) END
                   OFFSET 0  -- one look at each
                   ) AS u (count)
             WHERE x.ends_at < now() - p.retention
                -- One that isn't recorded is being detached by hand.
                OR (x.detach_pending AND EXISTS (SELECT FROM outbox.retiring_partition r
                                                  WHERE to_regclass(r.partition) = x.partition AND r.detach_by IS NOT NULL))
             ORDER BY x.detach_pending DESC, x.starts_at
        LOOP
            reason := format('all of it is older than the retention of %s', p.retention);
            IF step = 'finalize' THEN
                reason := 'its detach is waiting for a transaction, or was interrupted';
                statement := format('ALTER TABLE %s DETACH PARTITION %s FINALIZE', p.parent_table, partition);
            ELSIF step = 'hold' THEN
                reason := reason || CASE WHEN unsettled IS NULL THEN ', but nobody can tell whether it has unsettled rows'
                                         ELSE ', but it has unsettled rows' END;
                statement := format('SELECT * FROM %s WHERE %s', partition, p.unsettled);
            ELSIF v_clock IS NOT NULL THEN
                step := 'refuse';
                reason := v_clock;
                statement := 'SELECT outbox.accept_clock()';
            ELSE
                statement := format('ALTER TABLE %s DETACH PARTITION %s CONCURRENTLY', p.parent_table, partition);
            END IF;
            RETURN NEXT;
        END LOOP;
    END LOOP;
    SELECT q.* INTO p FROM outbox.partition_policy q WHERE q.parent_table = 'inbox.receipt';
    IF parent IS NULL AND v_clock IS NULL AND EXISTS (SELECT FROM inbox.foreign_receipt f WHERE f.received_at < now() - p.retention) THEN
        step := 'trim'; parent_table := 'inbox.foreign_receipt'; partition := NULL; starts_at := NULL; ends_at := NULL; unsettled := NULL;
        reason := format('rows older than the retention of inbox.receipt, %s', p.retention);
        statement := 'CALL outbox.trim_foreign_receipts()';
        RETURN NEXT;
    END IF;
END
$body$;
COMMENT ON FUNCTION outbox.upkeep_plan IS
    'what the upkeep would do now, and why: make, drop, keep, attach, finalize, hold or detach a partition, trim, or refuse because of the clock';

CREATE FUNCTION outbox.holder_of_lock(key bigint, OUT is_ours boolean, OUT described text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT coalesce(pg_has_role(a.usesysid, c.relowner, 'MEMBER')
                    OR has_function_privilege(a.usesysid, 'outbox.finish_detached(text)', 'EXECUTE'), false),
           format('session %s of role %s (application %s)', l.pid, coalesce(a.usename, '?'), coalesce(nullif(a.application_name, ''), '?'))
      FROM pg_locks l
      JOIN pg_class c ON c.oid = 'outbox.message'::regclass
      LEFT JOIN pg_stat_activity a ON a.pid = l.pid
     WHERE l.locktype = 'advisory' AND l.granted AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
       AND l.classid::bigint = (key >> 32) & 4294967295 AND l.objid::bigint = key & 4294967295 AND l.objsubid = 1
     ORDER BY 1 LIMIT 1;
END;
COMMENT ON FUNCTION outbox.holder_of_lock IS
    'the session that holds an advisory lock, and whether its role may run the upkeep; null: none any more';

-- In a subtransaction, which undoes what a failed archive function has written.
CREATE FUNCTION outbox.archive_partition(function_name text, partition regclass, starts_at timestamptz, ends_at timestamptz) RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '5s'
AS $body$
DECLARE
    a record;
BEGIN
    SELECT * INTO a FROM outbox.archive_problem(function_name);
    IF a.problem IS NOT NULL THEN
        RETURN format('%s is not archived: %s', partition, a.problem);
    END IF;
    BEGIN
        EXECUTE format('GRANT SELECT ON %s TO %I', partition, a.archivist);
        EXECUTE format('SELECT %s($1, $2, $3, $4)', a.call)
          USING (SELECT n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = partition),
                (SELECT c.relname::text FROM pg_class c WHERE c.oid = partition), starts_at, ends_at;
    EXCEPTION WHEN OTHERS THEN
        RETURN format('%s is not archived, and so not dropped: %s: %s (SQLSTATE %s)', partition, a.call, SQLERRM, SQLSTATE);
    END;
    RETURN NULL;
END
$body$;
COMMENT ON FUNCTION outbox.archive_partition IS
    'call the archive function for a partition that will be dropped; returns the error, or null';

-- Records what has expired, and completes detaches, in one transaction: it finalizes interrupted
-- ones, checks the rows and the policy again, then drops the table or attaches it again. A record
-- stays as long as its table: a job or a command that was planned before may still detach a
-- partition that has to stay by now. Returns what was done, by partition, and what to report;
-- `skipped`, without a partition, if another session is doing this.
CREATE FUNCTION outbox.finish_detached(parent text)
RETURNS TABLE (partition text, outcome text, problem text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, MDY'
SET intervalstyle = 'postgres'
SET lock_timeout = '100ms'
SET jit = off
AS $body$
DECLARE
    p outbox.partition_policy;
    v_clock text := outbox.clock_problem();
    v_lock bigint := hashtextextended('outbox.finish_detached ' || parent, 0);
    v_holder record;
    v_newest timestamptz;
    v_leaving text[] := '{}';
    v_reason text;
    v_own record;
    s record;
BEGIN
    SELECT * INTO STRICT p FROM outbox.partition_policy q WHERE q.parent_table = parent;
    -- Usually nothing has expired.
    IF NOT EXISTS (SELECT FROM outbox.retiring_partition r WHERE r.parent_table = parent)
       AND NOT EXISTS (SELECT FROM outbox.partitions(parent) x WHERE x.ends_at < now() - p.retention) THEN
        RETURN;
    END IF;
    -- Two at once would wait for each other's records.
    IF NOT pg_try_advisory_xact_lock(v_lock) THEN
        SELECT * INTO v_holder FROM outbox.holder_of_lock(v_lock);
        outcome := 'skipped';
        IF v_holder.is_ours IS FALSE THEN
            problem := format('%s holds the upkeep''s lock but is no upkeep: terminate it', v_holder.described);
        ELSE
            RAISE NOTICE 'another upkeep is handling the detached partitions of %', parent
                USING HINT = 'nothing is wrong';
        END IF;
        RETURN NEXT;
        RETURN;
    END IF;
    FOR s IN SELECT q.* FROM outbox.upkeep_plan(parent) q WHERE q.step IN ('drop', 'keep', 'attach', 'detach', 'finalize') LOOP
        v_leaving := v_leaving || s.partition;
        INSERT INTO outbox.retiring_partition AS r VALUES (s.partition, parent, s.starts_at, s.ends_at)
            ON CONFLICT ON CONSTRAINT retiring_partition_pkey DO UPDATE
            SET starts_at = excluded.starts_at, ends_at = excluded.ends_at, planned_at = now() WHERE r.planned_at IS NULL;
        CONTINUE WHEN s.step <> 'finalize' OR NOT outbox.may_finalize(to_regclass(s.partition));
        partition := s.partition;
        BEGIN
            EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', s.partition);
            -- FINALIZE waits for every older statement in this database, but writers need neither this
            -- partition nor its lock on the parent.
            PERFORM set_config('lock_timeout', '5s', true);
            EXECUTE s.statement;
            PERFORM set_config('lock_timeout', '100ms', true);
            outcome := 'finalized';
        EXCEPTION WHEN lock_not_available OR deadlock_detected OR undefined_table OR object_not_in_prerequisite_state THEN
            outcome := 'busy';
        END;
        RETURN NEXT;
    END LOOP;
    UPDATE outbox.retiring_partition r SET planned_at = NULL
     WHERE r.parent_table = parent AND r.planned_at IS NOT NULL AND r.partition <> ALL (v_leaving);
    DELETE FROM outbox.retiring_partition r WHERE r.parent_table = parent AND to_regclass(r.partition) IS NULL;
    DELETE FROM outbox.kept_partition k WHERE k.parent_table = parent AND to_regclass(k.partition) IS NULL;
    FOR partition IN
        DELETE FROM outbox.retiring_partition r USING pg_class c
         WHERE r.parent_table = parent AND r.detach_by IS NULL AND c.oid = to_regclass(r.partition) AND NOT c.relispartition
        RETURNING r.partition
    LOOP
        outcome := 'detached by hand, and left alone';
        RETURN NEXT;
    END LOOP;
    FOR s IN SELECT r.* FROM outbox.retiring_partition r JOIN pg_class c ON c.oid = to_regclass(r.partition)
              WHERE r.parent_table = parent AND r.detach_by IS NOT NULL AND NOT c.relispartition ORDER BY r.starts_at LOOP
        problem := NULL;
        partition := s.partition;
        BEGIN
            -- Queries on the parent no longer reach it; queries on it wait for this lock.
            EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', s.partition);
            v_reason := CASE WHEN outbox.count_unsettled(parent, s.partition::regclass) IS DISTINCT FROM 0 THEN 'it has unsettled rows'
                             WHEN s.ends_at >= now() - p.retention THEN format('the retention of %s keeps it', p.retention) END;
            IF v_reason IS NOT NULL THEN
                EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                               parent::regclass, s.partition, s.starts_at, s.ends_at);
                outcome := 'attached again';
                UPDATE outbox.retiring_partition r SET planned_at = NULL,
                       -- Its job may still be scheduled.
                       detach_by = CASE r.detach_by WHEN 'pg_cron' THEN 'pg_cron' END
                 WHERE r.partition = s.partition;
                RAISE WARNING 'detached partition % has been attached again: %', s.partition, v_reason;
            ELSIF v_clock IS NOT NULL THEN
                CONTINUE;
            ELSE
                IF p.archive IS NOT NULL AND NOT p.keep_table THEN
                    problem := outbox.archive_partition(p.archive, s.partition::regclass, s.starts_at, s.ends_at);
                    IF problem IS NOT NULL THEN
                        outcome := 'not dropped, because it could not be archived';
                        RETURN NEXT;
                        CONTINUE;
                    END IF;
                END IF;
                v_newest := NULL;
                IF p.control = 'message_at' THEN
                    EXECUTE format('SELECT message_at FROM %s ORDER BY message_id DESC LIMIT 1', s.partition) INTO v_newest;
                END IF;
                INSERT INTO outbox.dropped_partition AS d (parent_table, starts_at, ends_at, newest)
                VALUES (parent, s.starts_at, s.ends_at, v_newest)
                    ON CONFLICT ON CONSTRAINT dropped_partition_pkey DO UPDATE
                    SET dropped_at = now(), newest = greatest(d.newest, excluded.newest);
                DELETE FROM outbox.dropped_partition d
                 WHERE d.parent_table = parent AND d.ends_at < s.ends_at - interval '400 days' - p.retention;
                IF p.keep_table THEN
                    -- It must outlive the sequence and the functions that its constraints use.
                    FOR v_own IN SELECT a.attname FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
                              WHERE d.adrelid = s.partition::regclass
                    LOOP
                        EXECUTE format('ALTER TABLE %s ALTER COLUMN %I DROP DEFAULT', s.partition, v_own.attname);
                    END LOOP;
                    FOR v_own IN SELECT q.conname FROM pg_constraint q WHERE q.conrelid = s.partition::regclass AND q.contype = 'c' LOOP
                        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', s.partition, v_own.conname);
                    END LOOP;
                    INSERT INTO outbox.kept_partition VALUES (s.partition, parent, s.starts_at, s.ends_at) ON CONFLICT DO NOTHING;
                    outcome := 'kept';
                ELSE
                    EXECUTE format('DROP TABLE %s', s.partition);
                    outcome := 'dropped';
                END IF;
                DELETE FROM outbox.retiring_partition r WHERE r.partition = s.partition;
            END IF;
        EXCEPTION WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
            outcome := 'busy';
        END;
        RETURN NEXT;
    END LOOP;
END
$body$;
COMMENT ON FUNCTION outbox.finish_detached IS
    'record what has expired, finalize interrupted detaches, drop detached partitions, and attach those again that must stay';

-- Runs as the detacher, since cron.schedule() records the current user. pg_cron has no one-shot jobs:
-- these name a minute of the hour, which needs no time zone (only administrators can read
-- cron.timezone), and the next run, an hour later, unschedules them.
CREATE FUNCTION outbox.schedule_detaches() RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    -- The launcher may only see a new job in the next minute.
    v_first int := extract(minute FROM now() + interval '10 seconds');
    v_count int := 0;
    s record;
BEGIN
    FOR s IN
        SELECT j.jobid, j.jobname, j.command,
               outbox.detach_under_way() AND EXISTS (
                   SELECT FROM outbox.partition_policy p, outbox.partitions(p.parent_table) x
                    WHERE x.detach_pending AND j.jobname = 'pillarbox detach ' || x.partition) AS runs
          FROM cron.job j
         WHERE j.jobname LIKE 'pillarbox detach %' AND j.database = current_database() AND j.username = current_user
    LOOP
        IF s.runs THEN
            -- Unscheduling a running job would cancel it: move it to a date that never comes.
            PERFORM cron.schedule(s.jobname, '0 0 30 2 *', s.command);
        ELSE
            PERFORM cron.unschedule(s.jobid);
        END IF;
    END LOOP;
    -- Their jobs are unscheduled: from now on, only somebody else can detach them.
    UPDATE outbox.retiring_partition r SET detach_by = NULL
     WHERE r.detach_by = 'pg_cron'
       AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = to_regclass(r.partition) AND NOT i.inhdetachpending);
    PERFORM outbox.finish_detached(p.parent_table) FROM outbox.partition_policy p;
    FOR s IN
        SELECT p.*, row_number() OVER (PARTITION BY p.parent_table ORDER BY p.starts_at) AS turn
          FROM outbox.upkeep_plan() p
         WHERE p.step = 'detach'
           -- Another upkeep may be recording them, or may have failed to.
           AND EXISTS (SELECT FROM outbox.retiring_partition r WHERE r.partition = p.partition)
           -- A table can have only one pending detach.
           AND NOT EXISTS (SELECT FROM outbox.partitions(p.parent_table) x WHERE x.detach_pending)
    LOOP
        CONTINUE WHEN s.turn > 50;  -- the rest in the next hour
        PERFORM cron.schedule('pillarbox detach ' || s.partition,
            format('%s * * * *', (v_first + s.turn) % 60), s.statement);
        UPDATE outbox.retiring_partition r SET detach_by = 'pg_cron' WHERE r.partition = s.partition;
        v_count := v_count + 1;
    END LOOP;
    DELETE FROM cron.job_run_details WHERE username = current_user AND start_time < now() - interval '14 days';
    RETURN v_count;
END
$body$;
COMMENT ON FUNCTION outbox.schedule_detaches IS
    'schedule a pg_cron job for each expired partition, one per minute, to detach it; returns how many';
RESET ROLE;
