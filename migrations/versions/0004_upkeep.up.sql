-- Owner part: the upkeep. It creates partitions and drops detached ones: pg_cron's jobs or pillarbox maintain detach them.

-- Each step of each table in its own transaction: a failure is recorded, and the other steps follow. A canceled
-- statement ends only its step, so that a statement_timeout doesn't keep partitions from being created. Returns
-- `again` if there is more to do, and `skipped` if another upkeep is doing it.
CREATE FUNCTION outbox.upkeep_step(step text, parent text) RETURNS text
LANGUAGE plpgsql {pinned}
AS $body$
DECLARE
    v_problem text := outbox.clock_problem();
    v_outcome text;
    v_context text;
    d record;
BEGIN
    IF step = 'clock' AND v_problem IS NOT NULL THEN
        PERFORM outbox.note_failure(format('nothing is dropped, and partitions are created for today and tomorrow only: %s; if the clock'
            ' is right, run: pillarbox maintain --accept-clock (in SQL: SELECT outbox.accept_clock())', v_problem), step);
    ELSIF step = 'premake' THEN
        PERFORM outbox.make_partitions(parent);
    ELSIF step = 'retention' THEN
        FOR d IN SELECT f.* FROM outbox.finish_detached(parent) f LOOP
            IF d.outcome = 'skipped' THEN
                v_outcome := d.outcome;
            ELSIF d.outcome <> 'failed' THEN
                RAISE NOTICE '%: %', d.partition, d.outcome;
            END IF;
        END LOOP;
    ELSIF step = 'trim' AND outbox.trim_batch(parent) > 0 THEN
        v_outcome := 'again';
    END IF;
    RETURN v_outcome;
EXCEPTION WHEN OTHERS OR query_canceled THEN
    GET STACKED DIAGNOSTICS v_context = PG_EXCEPTION_CONTEXT;
    PERFORM outbox.note_failure(SQLERRM, step, parent, parent, SQLSTATE, v_context);
    RETURN NULL;
END
$body$;
COMMENT ON FUNCTION outbox.upkeep_step IS 'take one step of the upkeep, and record its failure';

-- Failures of this run replace those of earlier ones, except of concurrent detaches, which only their
-- job or command tries again, within the hour.
CREATE FUNCTION outbox.end_upkeep(began_at timestamptz, is_complete boolean) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER {pinned}
AS $body$
DECLARE
    v_failures text;
BEGIN
    DELETE FROM outbox.upkeep_failure f
     WHERE is_complete AND (f.failed_at < began_at OR f.failed_at > clock_timestamp())  -- the clock was ahead
       AND NOT (f.step IN ('detach', 'finalize') AND f.failed_at > began_at - interval '1 hour'
                AND EXISTS (SELECT FROM pg_class c WHERE c.oid = to_regclass(f.object) AND c.relispartition));
    SELECT string_agg(f.failure, '; ' ORDER BY f.failed_at) INTO v_failures
      FROM outbox.upkeep_failure f WHERE is_complete OR f.failed_at >= began_at;
    IF v_failures IS NULL AND is_complete THEN
        INSERT INTO outbox.upkeep (succeeded_at) VALUES (clock_timestamp())
            ON CONFLICT (is_it) DO UPDATE SET succeeded_at = EXCLUDED.succeeded_at, accepted_at = NULL;
    END IF;
    RETURN v_failures;
END
$body$;
COMMENT ON FUNCTION outbox.end_upkeep IS 'delete failures that no longer occur, and return the others, or record a success';

CREATE PROCEDURE outbox.maintain(since timestamptz DEFAULT NULL)
LANGUAGE plpgsql
AS $body$
DECLARE
    v_began_at timestamptz;
    v_outcome text;
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
          FROM (VALUES (1, 'clock', NULL), (2, 'premake', NULL), (3, 'retention', NULL),
                       (4, 'trim', 'inbox.foreign_receipt'), (5, 'trim', 'outbox.operation'),
                       (6, 'clock', NULL)) AS k (turn, step, parent_table)  -- again: it may have jumped meanwhile
          LEFT JOIN outbox.partition_policy p ON k.step IN ('premake', 'retention')
         ORDER BY k.turn, p.follows NULLS FIRST, p.parent_table
    LOOP
        LOOP
            v_outcome := outbox.upkeep_step(s.step, s.parent_table);
            COMMIT;
            SET LOCAL search_path = pg_catalog, pg_temp;
            SET LOCAL row_security = off;
            EXIT WHEN v_outcome IS DISTINCT FROM 'again';
        END LOOP;
        IF v_outcome = 'skipped' THEN
            v_left := concat_ws('; ', v_left, format('the retention of %s was left to another upkeep', s.parent_table));
        END IF;
    END LOOP;
    v_failures := outbox.end_upkeep(v_began_at, v_left IS NULL);
    COMMIT;
    IF v_failures IS NOT NULL THEN
        RAISE EXCEPTION 'upkeep: %', v_failures;  -- shows the run as failed in cron.job_run_details
    ELSIF v_left IS NOT NULL THEN
        -- The other upkeep records how it ended.
        RAISE NOTICE '%', v_left USING HINT = 'this run is not recorded as a success';
    END IF;
END
$body$;
COMMENT ON PROCEDURE outbox.maintain IS
    'create partitions and drop detached ones, for every table of the policy; failures since the time given, if any, are those of this run';
