-- Owner part: the upkeep, which completes the detaches that pg_cron's jobs began, and itself detaches only what they left.

SET LOCAL ROLE {owner};

-- The fallback, if nothing can detach concurrently, or no job has detached the partition within
-- `patience` since the upkeep first found it expired. Detaches one partition in its own transaction,
-- so that it never waits for a lock while it holds others, and locks the table only for the change of
-- the catalog: rows are checked before, and by outbox.finish_detached afterwards.
-- Returns detached, held (an unsettled row), busy (the lock wasn't available), skipped (another
-- upkeep is handling this table), failed (the failure was recorded) or none.
CREATE FUNCTION outbox.detach_expired(parent text, INOUT skip regclass[], patience interval, OUT outcome text, OUT partition regclass)
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
    v_context text;
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
    partition := x.partition;
    skip := skip || partition;
    BEGIN
        SELECT u.* INTO STRICT v_held FROM outbox.describe_unsettled(parent, x.partition, x.starts_at, x.ends_at) AS u;
        IF v_held.unsettled IS NULL AND v_held.described IS NOT NULL THEN
            RAISE EXCEPTION '%', v_held.described;
        ELSIF v_held.unsettled IS NULL THEN
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
    EXCEPTION
        WHEN lock_not_available OR deadlock_detected OR undefined_table OR object_not_in_prerequisite_state THEN
            skip := skip[1:cardinality(skip) - 1];
            outcome := 'busy';
        WHEN OTHERS OR query_canceled THEN
            outcome := 'failed';
            GET STACKED DIAGNOSTICS v_context = PG_EXCEPTION_CONTEXT;
            PERFORM outbox.note_failure(SQLERRM, 'detach', parent, x.partition::text, SQLSTATE, v_context);
    END;
END
$body$;
COMMENT ON FUNCTION outbox.detach_expired IS 'detach the oldest expired partition that is not in skip, under a short lock; returns the outcome, and the partition';

-- Each step of each table in a transaction of its own: whatever fails in it is recorded, and the others
-- follow. A canceled statement ends its step alone, since statement_timeout is no reason to create no
-- partitions. Returns the step that follows for this table, if any.
CREATE FUNCTION outbox.upkeep_step(INOUT step text, parent text, INOUT skip regclass[], patience interval, INOUT tries integer,
                                   max_tries integer, INOUT busy boolean, OUT skipped boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    v_step text := step;
    v_subject text := parent;
    v_problem text;
    v_context text;
    d record;
BEGIN
    step := NULL;
    skipped := false;
    IF busy THEN
        PERFORM pg_sleep(0.3 + random());
    END IF;
    busy := false;
    CASE v_step
    WHEN 'clock' THEN
        v_problem := outbox.clock_problem();
        IF v_problem IS NOT NULL THEN
            PERFORM outbox.note_failure(format('nothing is dropped, and partitions are created for today and tomorrow only: %s; if the clock'
                ' is right, run: pillarbox maintain --accept-clock (in SQL: SELECT outbox.accept_clock())', v_problem), v_step);
        END IF;
    WHEN 'premake' THEN
        PERFORM outbox.make_partitions(parent);
    WHEN 'finish' THEN
        FOR d IN SELECT f.* FROM outbox.finish_detached(parent) f LOOP
            skipped := skipped OR d.outcome = 'skipped';
            IF d.outcome = 'busy' THEN
                busy := true;
                v_subject := d.partition;
            ELSIF d.partition IS NOT NULL AND d.outcome <> 'failed' THEN
                RAISE NOTICE '%: %', d.partition, d.outcome;
            END IF;
        END LOOP;
        step := CASE WHEN NOT skipped THEN 'detach' END;
    WHEN 'detach' THEN
        SELECT e.* INTO d FROM outbox.detach_expired(parent, skip, patience) e;
        skip := d.skip;
        skipped := d.outcome = 'skipped';
        busy := d.outcome = 'busy';
        v_subject := coalesce(d.partition::text, parent);
        step := CASE WHEN d.outcome NOT IN ('none', 'skipped', 'busy') THEN 'finish' END;
    WHEN 'trim' THEN
        IF parent = 'inbox.foreign_receipt' THEN
            step := CASE WHEN outbox.trim_foreign_receipts_batch() > 0 THEN v_step END;
        ELSIF to_regprocedure('outbox.trim_operations()') IS NOT NULL THEN  -- which a later migration creates
            PERFORM outbox.trim_operations();
        END IF;
    END CASE;
    IF busy THEN
        tries := tries + 1;
        IF tries < max_tries THEN
            step := v_step;
        ELSE
            busy := false;
            PERFORM outbox.note_failure(format('no lock in %s tries, because a transaction is using it', tries),
                                        CASE v_step WHEN 'finish' THEN 'drop' ELSE v_step END, parent, v_subject, '55P03');
        END IF;
    END IF;
EXCEPTION WHEN OTHERS OR query_canceled THEN
    GET STACKED DIAGNOSTICS v_context = PG_EXCEPTION_CONTEXT;
    PERFORM outbox.note_failure(SQLERRM, CASE WHEN v_step IN ('finish', 'detach') THEN 'retention' ELSE v_step END,
                                parent, parent, SQLSTATE, v_context);
    step := CASE v_step WHEN 'finish' THEN 'detach' END;
    busy := false;
END
$body$;
COMMENT ON FUNCTION outbox.upkeep_step IS 'take one step of the upkeep, and record its failure; returns the next one of this table';

-- Failures of this run replace those of earlier ones, except of concurrent detaches, which only their
-- job or command tries again.
CREATE FUNCTION outbox.end_upkeep(began_at timestamptz, is_complete boolean) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    v_failures text;
BEGIN
    DELETE FROM outbox.upkeep_failure f
     WHERE is_complete AND (f.failed_at < began_at OR f.failed_at > clock_timestamp())  -- the clock was ahead
       AND NOT (f.step IN ('detach', 'finalize') AND EXISTS (
           SELECT FROM outbox.retiring_partition r JOIN pg_class c ON c.oid = to_regclass(r.partition)
            WHERE r.partition = f.object AND r.planned_at IS NOT NULL AND c.relispartition));
    SELECT string_agg(f.failure, '; ' ORDER BY f.failed_at) INTO v_failures
      FROM outbox.upkeep_failure f WHERE is_complete OR f.failed_at >= began_at;
    IF v_failures IS NULL AND is_complete THEN
        INSERT INTO outbox.upkeep (succeeded_at) VALUES (clock_timestamp())
            ON CONFLICT (is_it) DO UPDATE SET succeeded_at = EXCLUDED.succeeded_at, accepted_at = NULL;
    END IF;
    RETURN v_failures;
END
$body$;
COMMENT ON FUNCTION outbox.end_upkeep IS 'forget failures that no longer occur, and return the others, or record a success';

CREATE PROCEDURE outbox.maintain(max_tries integer DEFAULT 60, patience interval DEFAULT '0', since timestamptz DEFAULT NULL)
LANGUAGE plpgsql
AS $body$
DECLARE
    v_began_at timestamptz;
    v_step text;
    v_skip regclass[];
    v_tries int;
    v_busy boolean;
    v_skipped boolean;
    v_left text;
    v_failures text;
    s record;
BEGIN
    -- A procedure that commits can't have a SET clause, and each COMMIT restores the caller's path,
    -- where another role's operator may match better than the catalog's.
    SET LOCAL search_path = pg_catalog, pg_temp;
    SET LOCAL row_security = off;
    v_began_at := coalesce(since, clock_timestamp());
    FOR s IN
        -- The partitions of all tables first. A follower's partition can go when its leader's has gone.
        SELECT k.step, coalesce(k.parent_table, p.parent_table) AS parent_table
          FROM (VALUES (1, 'clock', NULL), (2, 'premake', NULL), (3, 'finish', NULL),
                       (4, 'trim', 'inbox.foreign_receipt'), (5, 'trim', 'outbox.operation'),
                       (6, 'clock', NULL)) AS k (turn, step, parent_table)  -- again: it may have jumped meanwhile
          LEFT JOIN outbox.partition_policy p ON k.step IN ('premake', 'finish')
         ORDER BY k.turn, p.follows NULLS FIRST, p.parent_table
    LOOP
        v_step := s.step;
        v_skip := '{}';
        v_tries := 0;
        v_busy := false;
        WHILE v_step IS NOT NULL LOOP
            SELECT u.step, u.skip, u.tries, u.busy, u.skipped INTO v_step, v_skip, v_tries, v_busy, v_skipped
              FROM outbox.upkeep_step(v_step, s.parent_table, v_skip, patience, v_tries, max_tries, v_busy) u;
            COMMIT;
            SET LOCAL search_path = pg_catalog, pg_temp;
            SET LOCAL row_security = off;
            IF v_skipped THEN
                v_left := concat_ws('; ', v_left, format('the retention of %s was left to another upkeep', s.parent_table));
            END IF;
        END LOOP;
    END LOOP;
    v_failures := outbox.end_upkeep(v_began_at, v_left IS NULL);
    COMMIT;
    SET LOCAL search_path = pg_catalog, pg_temp;
    SET LOCAL row_security = off;
    IF v_failures IS NOT NULL THEN
        RAISE EXCEPTION 'upkeep: %', v_failures;  -- shows the run as failed in cron.job_run_details
    ELSIF v_left IS NOT NULL THEN
        -- The other upkeep records how it ended.
        RAISE NOTICE '%', v_left USING HINT = 'this run is not recorded as a success';
    END IF;
END
$body$;
COMMENT ON PROCEDURE outbox.maintain IS
    'create partitions, then apply the retention, for every table of the policy; for as long as patience, detaches are left to jobs; failures since the time given, if any, are those of this run';

RESET ROLE;
