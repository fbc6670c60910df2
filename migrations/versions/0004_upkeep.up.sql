-- Owner part: the upkeep, which completes the detaches that pg_cron's jobs began, and itself detaches only what they left.

SET LOCAL ROLE {owner};

-- The fallback, if nothing can detach concurrently, or no job has detached the partition within
-- `patience` since the upkeep first found it expired. Detaches one partition in its own transaction,
-- so that it never waits for a lock while it holds others, and locks the table only for the change of
-- the catalog: rows are checked before, and by outbox.finish_detached afterwards.
-- Returns detached, held (an unsettled row), busy (the lock wasn't available), skipped (another
-- upkeep is handling this table) or none.
CREATE FUNCTION outbox.detach_expired(parent text, INOUT skip regclass[], patience interval, OUT outcome text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET quote_all_identifiers = off
SET timezone = 'UTC'
SET datestyle = 'ISO, MDY'
SET intervalstyle = 'postgres'
SET jit = off
SET lock_timeout = '100ms'  -- a waiting ACCESS EXCLUSIVE request stalls every writer behind it
AS $body$
DECLARE
    p outbox.partition_policy;
    x record;
    v_held record;
BEGIN
    SELECT * INTO STRICT p FROM outbox.partition_policy WHERE parent_table = parent;
    -- A condition or a gate that fails would hold every partition forever: let it fail here, where it is reported.
    BEGIN
        IF p.unsettled IS NOT NULL THEN
            EXECUTE format('SELECT FROM %s WHERE %s LIMIT 0', p.template, p.unsettled);
        ELSIF p.gate IS NOT NULL THEN
            EXECUTE format('SELECT FROM %s($1, now(), now(), 0)', p.gate) USING p.template::regclass;
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN  -- a gate reads other tables, whose retention another upkeep may have reached
        outcome := 'busy';
        RETURN;
    END;
    outcome := 'none';
    IF outbox.clock_problem() IS NOT NULL THEN
        RETURN;
    END IF;
    IF patience > interval '0' AND NOT EXISTS (
        SELECT FROM outbox.retiring_partition r WHERE r.parent_table = parent AND r.planned_at <= now() - patience)
    THEN
        RETURN;
    END IF;
    SELECT q.* INTO x
      FROM outbox.partitions(parent) q
     WHERE q.ends_at < now() - p.retention AND q.partition <> ALL (skip) AND NOT q.detach_pending
       AND NOT outbox.is_followed(parent, q.starts_at, q.ends_at)
       AND (patience = interval '0' OR EXISTS (
           SELECT FROM outbox.retiring_partition r
            WHERE to_regclass(r.partition) = q.partition AND r.planned_at <= now() - patience))
     ORDER BY q.ends_at LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- The other one would wait for the record that this one writes.
    IF NOT pg_try_advisory_xact_lock(hashtextextended('outbox.finish_detached ' || parent, 0)) THEN
        outcome := 'skipped';
        RETURN;
    END IF;
    skip := skip || x.partition;
    BEGIN
        SELECT u.* INTO STRICT v_held FROM outbox.describe_unsettled(parent, x.partition, x.starts_at, x.ends_at) AS u;
        IF v_held.unsettled IS NULL THEN
            RAISE lock_not_available;  -- on a table that the gate reads
        ELSIF v_held.unsettled > 0 THEN
            outcome := 'held';
            RAISE WARNING 'partition % is past its retention, but held: it has %', x.partition, v_held.described
                USING HINT = outbox.show_unsettled(parent, x.partition::text, x.starts_at, x.ends_at);
            RETURN;
        END IF;
        -- The partition first: if it is being read, the table isn't locked meanwhile.
        EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', x.partition);
        INSERT INTO outbox.retiring_partition AS r (partition, parent_table, starts_at, ends_at, detach_by)
        VALUES (x.partition, parent, x.starts_at, x.ends_at, 'outbox.maintain()')
            ON CONFLICT ON CONSTRAINT retiring_partition_pkey DO UPDATE SET detach_by = excluded.detach_by;
        EXECUTE format('ALTER TABLE %s DETACH PARTITION %s', parent::regclass, x.partition);
        outcome := 'detached';
    -- Or another upkeep has detached or dropped it, or is about to.
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR undefined_table OR object_not_in_prerequisite_state THEN
        skip := skip[1:cardinality(skip) - 1];
        outcome := 'busy';
    END;
END
$body$;
COMMENT ON FUNCTION outbox.detach_expired IS 'detach the oldest expired partition that is not in skip, under a short lock; returns the outcome';

CREATE PROCEDURE outbox.maintain(max_tries integer DEFAULT 60, patience interval DEFAULT '0')
LANGUAGE plpgsql
AS $body$
DECLARE
    v_parent text;
    v_skip regclass[];
    v_outcome text;
    v_tries int;
    v_problem text;
    v_problems text := '';
    v_skipped text := '';
    v_left text;
    f record;
BEGIN
    -- A procedure that commits can't have a SET clause, and each COMMIT restores the caller's path,
    -- where another role's operator may match better than the catalog's.
    SET LOCAL search_path = pg_catalog, pg_temp;
    v_problem := outbox.clock_problem();
    IF v_problem IS NOT NULL THEN
        v_problems := format('nothing is dropped, and partitions are created for today and tomorrow only: %s; if the clock is right,'
                             ' run: pillarbox maintain --accept-clock (in SQL: SELECT outbox.accept_clock()); ', v_problem);
    END IF;
    -- All of them first: making a table's partitions also makes its followers'.
    FOR v_parent IN SELECT p.parent_table FROM outbox.partition_policy p ORDER BY p.follows NULLS FIRST, p.parent_table LOOP
        BEGIN
            v_problem := outbox.put_back_settings(v_parent);
            IF v_problem IS NOT NULL THEN
                v_problems := v_problems || v_problem || '; ';
            END IF;
        EXCEPTION WHEN OTHERS THEN
            v_problems := v_problems || format('settings of pg_partman for %s: %s; ', v_parent, outbox.without_row(SQLERRM, SQLSTATE));
        END;
        COMMIT;
        SET LOCAL search_path = pg_catalog, pg_temp;
    END LOOP;
    -- A follower's partition can go when its leader's has gone.
    FOR v_parent IN SELECT p.parent_table FROM outbox.partition_policy p ORDER BY p.follows NULLS FIRST, p.parent_table LOOP
        v_left := format('the retention of %s was left to another upkeep; ', v_parent);
        BEGIN
            PERFORM outbox.make_partitions(v_parent);
        EXCEPTION WHEN OTHERS THEN
            v_problems := v_problems || format('premake of %s: %s; ', v_parent, outbox.without_row(SQLERRM, SQLSTATE));
        END;
        COMMIT;  -- apart from retention: a lock that can't be had there must not undo the days made here
        SET LOCAL search_path = pg_catalog, pg_temp;
        BEGIN
            FOR f IN SELECT q.outcome, q.problem FROM outbox.finish_detached(v_parent) q LOOP
                IF f.problem IS NOT NULL THEN
                    v_problems := v_problems || format('retention of %s: %s; ', v_parent, f.problem);
                ELSIF f.outcome = 'skipped' THEN
                    v_skipped := v_skipped || v_left;
                END IF;
            END LOOP;
        EXCEPTION WHEN OTHERS THEN
            v_problems := v_problems || format('detached partitions of %s: %s; ', v_parent, outbox.without_row(SQLERRM, SQLSTATE));
        END;
        COMMIT;
        SET LOCAL search_path = pg_catalog, pg_temp;
        v_skip := '{}';
        v_tries := 0;
        LOOP
            BEGIN
                SELECT d.skip, d.outcome INTO v_skip, v_outcome FROM outbox.detach_expired(v_parent, v_skip, patience) d;
            EXCEPTION WHEN OTHERS THEN
                v_outcome := 'none';
                v_problems := v_problems || format('retention of %s: %s; ', v_parent, outbox.without_row(SQLERRM, SQLSTATE));
            END;
            COMMIT;
            SET LOCAL search_path = pg_catalog, pg_temp;
            EXIT WHEN v_outcome = 'none';
            IF v_outcome = 'skipped' THEN
                v_skipped := replace(v_skipped, v_left, '') || v_left;
                EXIT;
            END IF;
            IF v_outcome = 'detached' THEN
                BEGIN
                    FOR f IN SELECT q.problem FROM outbox.finish_detached(v_parent) q WHERE q.problem IS NOT NULL LOOP
                        v_problems := v_problems || format('retention of %s: %s; ', v_parent, f.problem);
                    END LOOP;
                EXCEPTION WHEN OTHERS THEN
                    v_problems := v_problems || format('detached partitions of %s: %s; ', v_parent, outbox.without_row(SQLERRM, SQLSTATE));
                END;
                COMMIT;
                SET LOCAL search_path = pg_catalog, pg_temp;
            END IF;
            CONTINUE WHEN v_outcome <> 'busy';
            v_tries := v_tries + 1;
            IF v_tries >= max_tries THEN
                v_problems := v_problems || format('retention of %s: no lock in %s tries, because a transaction is using it; ', v_parent, v_tries);
                EXIT;
            END IF;
            PERFORM pg_sleep(0.3 + random());
            COMMIT;
            SET LOCAL search_path = pg_catalog, pg_temp;
        END LOOP;
    END LOOP;
    CALL outbox.trim_foreign_receipts();
    SET LOCAL search_path = pg_catalog, pg_temp;
    IF to_regprocedure('outbox.trim_operations()') IS NOT NULL THEN  -- which a later migration creates
        PERFORM outbox.trim_operations();
    END IF;
    IF v_problems = '' AND outbox.clock_problem() IS NOT NULL THEN
        v_problems := outbox.clock_problem() || '; ';  -- it jumped while the upkeep ran
    END IF;
    IF v_problems <> '' THEN
        PERFORM outbox.note_failure(rtrim(v_problems, '; '));
        COMMIT;
        SET LOCAL search_path = pg_catalog, pg_temp;
        RAISE EXCEPTION 'upkeep: %', v_problems;  -- shows the run as failed in cron.job_run_details
    END IF;
    IF v_skipped <> '' THEN
        -- The other upkeep records how it ended.
        RAISE NOTICE '%', rtrim(v_skipped, '; ') USING HINT = 'this run is not recorded as a success';
        RETURN;
    END IF;
    PERFORM outbox.note_success();
END
$body$;
COMMENT ON PROCEDURE outbox.maintain IS
    'create partitions, then apply the retention, for every table of the policy; for as long as patience, detaches are left to jobs';

RESET ROLE;
