-- Owner part: retention without stalling writers: which partitions may be dropped, their detach, and
-- their drop.

SET LOCAL ROLE {owner};

CREATE TABLE outbox.kept_partition (
    partition    text        NOT NULL,
    parent_table text        NOT NULL,
    starts_at    timestamptz NOT NULL,
    ends_at      timestamptz NOT NULL,
    kept_at      timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT kept_partition_pkey PRIMARY KEY (partition)
);
COMMENT ON TABLE outbox.kept_partition IS
    'detached partitions that the policy keeps (keep_table), ready to be archived: copy, move or drop them as you like; the upkeep only removes the rows here of tables that are gone';

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

-- A row of a leader must never be seen without its followers' rows. So a follower's partition stays
-- until the leader's partitions of that time are gone.
CREATE FUNCTION outbox.is_followed(parent text, starts_at timestamptz, ends_at timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    v_leader text := (SELECT p.follows FROM outbox.partition_policy p WHERE p.parent_table = parent);
BEGIN
    RETURN v_leader IS NOT NULL AND EXISTS (
        SELECT FROM outbox.partitions(v_leader) x
         -- Null: a DEFAULT partition, or one without a begin or an end.
         WHERE coalesce(x.starts_at < is_followed.ends_at AND x.ends_at > is_followed.starts_at, true)
        UNION ALL
        SELECT FROM outbox.retiring_partition r
         WHERE r.parent_table = v_leader AND to_regclass(r.partition) IS NOT NULL
           AND r.starts_at < is_followed.ends_at AND r.ends_at > is_followed.starts_at);
END
$body$;
COMMENT ON FUNCTION outbox.is_followed IS
    'whether the table that this one follows has a partition of this time, attached or detached, whose rows need this one''s';

CREATE VIEW outbox.partition_health AS
SELECT p.parent_table,
       p.retention,
       p.premake,
       count(x.*)                                                              AS partitions,
       min(x.starts_at)                                                        AS oldest,
       count(*) FILTER (WHERE x.starts_at > now())                             AS ahead,
       coalesce(bool_or(x.starts_at <= now() AND x.ends_at > now()), false)    AS has_today,
       -- A day that is held counts once: its followers are dropped after it.
       count(*) FILTER (WHERE CASE WHEN x.ends_at < now() - p.retention - interval '2 hours'
                                   THEN NOT outbox.is_followed(p.parent_table, x.starts_at, x.ends_at) END) AS overdue,
       count(*) FILTER (WHERE x.before < x.starts_at AND x.starts_at > now()
                          AND x.before < now() + p.premake * p.span)           AS gaps,
       count(*) FILTER (WHERE x.is_default)                                    AS defaults,
       count(*) FILTER (WHERE x.detach_pending)                                AS detach_pending,
       count(DISTINCT x.owner)                                                 AS owners
  FROM outbox.partition_policy p
  LEFT JOIN LATERAL (
      SELECT q.*, lag(q.ends_at) OVER (ORDER BY q.starts_at) AS before
        FROM outbox.partitions(p.parent_table) q
  ) x ON true
 GROUP BY p.parent_table, p.retention, p.premake;
COMMENT ON VIEW outbox.partition_health IS 'for alerts: has_today false, few partitions ahead, gaps, defaults, overdue, owners > 1';

-- The gate of outbox.message. Marks are never removed, so rows that were verified stay settled: if
-- outbox.watermark accounts for as many rows of each lane as the partition has, only those in
-- outbox.deferral can be open, and there are few of them. In a lane where the numbers differ, the
-- stretches are counted one by one, and only the ids of those that have more rows than were verified,
-- and of rows in no stretch, are compared with the marks; if that is much of the partition, all ids
-- are.
CREATE FUNCTION outbox.unsettled_messages(partition regclass, starts_at timestamptz, ends_at timestamptz, at_most integer DEFAULT 1000)
RETURNS TABLE (id uuid, created_at timestamptz, seq bigint, lane smallint, topic text, key text, tenant text, cause text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off  -- the narrow indexes instead of the rows; stale statistics can make a sequential scan look cheap
SET enable_bitmapscan = off
SET enable_nestloop = off  -- stale statistics can make it look cheap to read all marks once per row
SET jit = off  -- the estimated cost may be high enough for it
SET work_mem = '64MB'
AS $body$
DECLARE
    v_first timestamptz := date_bin('15 minutes', starts_at, '2000-01-01 00:00:00+00');
    v_cluster text := outbox.cluster();
    v_rows bigint;
    v_lanes smallint[];
    v_differ bigint;
    v_unknown smallint[];
    v_aboves bigint[];
    v_up_tos bigint[];
    v_ids uuid[];
    v_unmarked uuid[];
BEGIN
    v_ids := ARRAY(
        SELECT DISTINCT d.id
          FROM outbox.deferral d
         WHERE d.created_at >= unsettled_messages.starts_at AND d.created_at < unsettled_messages.ends_at AND d.cause <> 'settled'
           AND NOT EXISTS (
               SELECT FROM outbox.deferral s
                WHERE s.id = d.id AND s.run >= d.run AND s.cause = 'settled'
                  AND s.created_at >= unsettled_messages.starts_at AND s.created_at < unsettled_messages.ends_at)
           AND (d.run > 0 OR NOT EXISTS (
               SELECT FROM outbox.settlement s
                WHERE s.created_at = date_bin('15 minutes', d.created_at, '2000-01-01 00:00:00+00') AND s.lane = d.lane
                  AND s.last_seq >= d.seq AND s.last_seq < d.seq + 4096 AND s.first_seq <= d.seq
                  AND s.outcome <> 'deferred' AND d.id = ANY (s.ids)))
         LIMIT at_most);
    -- Stretches that overlap, which nobody writes, would count rows twice.
    EXECUTE format($query$
        SELECT sum(found.messages), array_agg(l.lane) FILTER (WHERE found.messages <> coalesce(verified.messages, 0))
          FROM generate_series(0, 47) AS l (lane)
          LEFT JOIN (
               SELECT w.lane, sum(w.messages) AS messages
                 FROM (SELECT q.lane, q.messages, q.above,
                              max(q.up_to) OVER (PARTITION BY q.lane ORDER BY q.above ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
                         FROM outbox.watermark q
                        WHERE q.created_at = $1 AND q.cluster = $2) AS w
                WHERE w.above >= coalesce(w.reached, -1)
                GROUP BY w.lane
               ) AS verified ON verified.lane = l.lane
         CROSS JOIN LATERAL (SELECT count(*) FROM %s AS m WHERE m.lane = l.lane) AS found (messages) $query$, partition)
       INTO v_rows, v_lanes USING starts_at, v_cluster;
    IF v_lanes IS NOT NULL AND cardinality(v_ids) < at_most THEN
        EXECUTE format($query$
            WITH kept AS MATERIALIZED (
                SELECT w.lane, w.above, w.up_to, w.messages
                  FROM (SELECT q.*, max(q.up_to) OVER (PARTITION BY q.lane ORDER BY q.above ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
                          FROM outbox.watermark q
                         WHERE q.created_at = $1 AND q.cluster = $2 AND q.lane = ANY ($3)) AS w
                 WHERE w.above >= coalesce(w.reached, -1)
            ), part AS (
                SELECT k.* FROM kept AS k
                 UNION ALL
                -- Between the stretches, below the first, and above the last: nothing there was verified.
                SELECT g.lane, g.above, g.up_to, 0
                  FROM (SELECT e.lane, lag(e.up_to, 1, -9223372036854775808) OVER (PARTITION BY e.lane ORDER BY e.above) AS above, e.above AS up_to
                          FROM (SELECT k.lane, k.above, k.up_to FROM kept AS k
                                 UNION ALL
                                SELECT l.lane, 9223372036854775807, 9223372036854775807 FROM unnest($3) AS l (lane)) AS e) AS g
                 WHERE g.above < g.up_to
            )
            SELECT sum(found.messages), array_agg(part.lane), array_agg(part.above), array_agg(part.up_to)
              FROM part
             CROSS JOIN LATERAL (SELECT count(*) FROM %s AS m
                                  WHERE m.lane = part.lane AND m.seq > part.above AND m.seq <= part.up_to) AS found (messages)
             WHERE found.messages <> part.messages $query$, partition)
           INTO v_differ, v_unknown, v_aboves, v_up_tos USING starts_at, v_cluster, v_lanes;
    END IF;
    IF v_differ > v_rows / 4 THEN
        EXECUTE format($query$
            SELECT array_agg(u.id) FROM (
                SELECT m.id
                  FROM %s AS m
                 WHERE NOT EXISTS (
                       SELECT FROM (SELECT unnest(s.ids) AS id FROM outbox.settlement s
                                      WHERE s.created_at >= $1 AND s.created_at < $2 AND s.outcome <> 'deferred') AS k
                        WHERE k.id = m.id)
                   AND NOT EXISTS (
                       SELECT FROM outbox.deferral s
                        WHERE s.id = m.id AND s.cause = 'settled' AND s.created_at >= $3 AND s.created_at < $2)
                 LIMIT $4
            ) AS u $query$, partition)
           INTO STRICT v_unmarked USING v_first, ends_at, starts_at, at_most;
    ELSIF v_differ > 0 THEN
        EXECUTE format($query$
            SELECT array_agg(u.id) FROM (
                SELECT m.id
                  FROM unnest($5, $6, $7) AS part (lane, above, up_to)
                 CROSS JOIN LATERAL (
                       SELECT q.id FROM %s AS q
                        WHERE q.lane = part.lane AND q.seq > part.above AND q.seq <= part.up_to
                       OFFSET 0) AS m
                 WHERE NOT EXISTS (
                       SELECT FROM (SELECT unnest(s.ids) AS id
                                      FROM unnest($5, $6, $7) AS part (lane, above, up_to)
                                     CROSS JOIN LATERAL (
                                           SELECT q.ids FROM outbox.settlement AS q
                                            WHERE q.created_at >= $1 AND q.created_at < $2 AND q.lane = part.lane
                                              AND q.last_seq > part.above
                                              AND q.last_seq <= least(part.up_to, 9223372036854771712) + 4095
                                              AND q.outcome <> 'deferred'
                                           OFFSET 0) AS s) AS k
                        WHERE k.id = m.id)
                   AND NOT EXISTS (
                       SELECT FROM outbox.deferral s
                        WHERE s.id = m.id AND s.cause = 'settled' AND s.created_at >= $3 AND s.created_at < $2)
                 LIMIT $4
            ) AS u $query$, partition)
           INTO STRICT v_unmarked USING v_first, ends_at, starts_at, at_most, v_unknown, v_aboves, v_up_tos;
    END IF;
    RETURN QUERY EXECUTE format($query$
        SELECT m.id, m.created_at, m.seq, m.lane, m.topic, m.key, m.tenant,
               coalesce(e.cause, CASE WHEN m.seq <= (SELECT max(w.up_to) FROM outbox.watermark w WHERE w.lane = m.lane AND w.cluster = $3)
                                      THEN 'inserted late' ELSE 'unclaimed' END)
          FROM %s AS m
          LEFT JOIN LATERAL (
               SELECT d.cause FROM outbox.deferral d
                WHERE d.id = m.id AND d.created_at = m.created_at ORDER BY d.run DESC, d.entry DESC LIMIT 1) AS e ON true
         WHERE m.id = ANY ($1)
         ORDER BY m.created_at LIMIT $2 $query$, partition) USING v_ids || v_unmarked, at_most, v_cluster;
END
$body$;
COMMENT ON FUNCTION outbox.unsettled_messages IS
    'the messages of a partition that are neither published nor dead-lettered, and those to be published again, up to at_most; cause is that of the last entry in the log, or unclaimed, or inserted late (below what was verified)';

CREATE FUNCTION outbox.show_unsettled(parent text, partition text, starts_at timestamptz, ends_at timestamptz) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, MDY'
BEGIN ATOMIC
    SELECT CASE WHEN p.gate IS NOT NULL THEN format('SELECT * FROM %s(%L, %L, %L)', p.gate, partition, starts_at, ends_at)
                ELSE format('SELECT * FROM %s WHERE %s', partition, p.unsettled) END
      FROM outbox.partition_policy p WHERE p.parent_table = parent;
END;
COMMENT ON FUNCTION outbox.show_unsettled IS 'the query that shows the unsettled rows of a partition';

-- For people: no values of the rows except their ids. Reads the rows once, which can take
-- long.
CREATE FUNCTION outbox.describe_unsettled(parent text, partition regclass, starts_at timestamptz, ends_at timestamptz,
                                          OUT unsettled bigint, OUT described text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, MDY'
SET enable_seqscan = off  -- stale statistics can make a sequential scan look cheap
SET jit = off  -- the estimated cost may be high enough for it
AS $body$
DECLARE
    p outbox.partition_policy;
    v_columns text;
    v_rows jsonb[];
BEGIN
    SELECT * INTO STRICT p FROM outbox.partition_policy q WHERE q.parent_table = parent;
    IF p.unsettled IS NOT NULL THEN
        SELECT string_agg(quote_ident(a.attname), ', ') INTO v_columns
          FROM pg_attribute a
         WHERE a.attrelid = partition AND NOT a.attisdropped
           AND a.attname IN ('id', 'message_id', 'consumer', 'created_at', 'message_at');
        EXECUTE format('SELECT array_agg(to_jsonb(u)) FROM (SELECT %s FROM %s WHERE %s LIMIT 1000) AS u', v_columns, partition, p.unsettled)
           INTO v_rows;
    ELSIF p.gate IS NOT NULL THEN
        EXECUTE format('SELECT array_agg(to_jsonb(u)) FROM %s($1, $2, $3, 1000) AS u', p.gate) INTO v_rows USING partition, starts_at, ends_at;
    END IF;
    WITH u AS (
        SELECT r ->> 'cause' AS cause, r ->> 'consumer' AS consumer,
               coalesce(r ->> 'id', r ->> 'message_id') AS id, coalesce(r ->> 'created_at', r ->> 'message_at')::timestamptz AS moment
          FROM unnest(v_rows) AS r
    )
    SELECT count(*),
           CASE count(*) WHEN 1000 THEN 'at least 1000' ELSE count(*)::text END || CASE count(*) WHEN 1 THEN ' unsettled row' ELSE ' unsettled rows' END
           || coalesce((SELECT ' (' || string_agg(c.count || ' ' || c.cause, ', ' ORDER BY c.count DESC, c.cause) || ')'
                          FROM (SELECT count(*), x.cause FROM u AS x WHERE x.cause IS NOT NULL GROUP BY x.cause) AS c), '')
           || coalesce(' of ' || string_agg(DISTINCT u.consumer, ', '), '')
           -- The first thousand need not be the oldest.
           || coalesce(CASE count(*) WHEN 1 THEN ': ' WHEN 1000 THEN ', such as ' ELSE ', the oldest ' END
                       || (array_agg(u.id ORDER BY u.moment))[1] || ' of ' || date_trunc('second', min(u.moment)), '')
      INTO unsettled, described FROM u;
EXCEPTION
    WHEN lock_not_available THEN
        unsettled := NULL;
        described := NULL;
    WHEN OTHERS THEN
        unsettled := NULL;
        described := outbox.without_row(SQLERRM, SQLSTATE);
END
$body$;
COMMENT ON FUNCTION outbox.describe_unsettled IS
    'how many unsettled rows a partition has, counted up to 1,000, and in words why each is unsettled, of which consumers, and the id of the oldest; null, and the error in words, if the condition or the gate fails; both null if it is locked';

CREATE FUNCTION outbox.upkeep_plan(parent text DEFAULT NULL)
RETURNS TABLE (step text, parent_table text, partition text, starts_at timestamptz, ends_at timestamptz,
               unsettled bigint, reason text, statement text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET quote_all_identifiers = off
SET timezone = 'UTC'
SET datestyle = 'ISO, MDY'
SET intervalstyle = 'postgres'
SET jit = off
AS $body$
DECLARE
    p outbox.partition_policy;
    v_clock text := outbox.clock_problem();
    v_followed boolean;
    v_described text;
BEGIN
    FOR p IN
        SELECT q.* FROM outbox.partition_policy q
         WHERE q.parent_table = coalesce(parent, q.parent_table) AND to_regclass(q.parent_table) IS NOT NULL
         ORDER BY q.parent_table
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
        FOR partition, starts_at, ends_at, unsettled, v_described IN
            SELECT r.partition, r.starts_at, r.ends_at, u.unsettled, u.described
              FROM outbox.retiring_partition r JOIN pg_class c ON c.oid = to_regclass(r.partition)
             CROSS JOIN LATERAL outbox.describe_unsettled(p.parent_table, c.oid, r.starts_at, r.ends_at) AS u
             WHERE r.parent_table = p.parent_table AND NOT c.relispartition AND r.detach_by IS NOT NULL ORDER BY r.starts_at
        LOOP
            v_followed := outbox.is_followed(p.parent_table, starts_at, ends_at);
            IF unsettled = 0 AND ends_at < now() - p.retention AND NOT v_followed AND v_clock IS NOT NULL THEN
                step := 'refuse';
                reason := v_clock;
                statement := 'SELECT outbox.accept_clock()';
            ELSIF unsettled = 0 AND ends_at < now() - p.retention AND NOT v_followed THEN
                step := CASE WHEN p.keep_table THEN 'keep' ELSE 'drop' END;
                reason := 'detached, and nothing in it is unsettled' || CASE WHEN p.keep_table THEN '; the policy keeps the table' ELSE '' END;
                statement := CASE WHEN p.keep_table
                                  THEN format('SELECT * FROM outbox.finish_detached(%L)', p.parent_table)
                                  ELSE format('DROP TABLE %s', partition) END;
            ELSE
                step := 'attach';
                reason := CASE WHEN v_followed THEN format('detached, but rows of %s need it', p.follows)
                               WHEN unsettled = 0 THEN format('detached, but the retention of %s keeps it', p.retention)
                               WHEN unsettled IS NULL THEN 'detached, but what finds its unsettled rows failed: ' || coalesce(v_described, 'locked')
                               ELSE 'detached, but something in it has become unsettled: ' || v_described END;
                statement := format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                                    p.parent_table, partition, starts_at, ends_at);
            END IF;
            RETURN NEXT;
        END LOOP;
        FOR step, partition, starts_at, ends_at IN
            SELECT CASE WHEN x.detach_pending THEN 'finalize' ELSE 'detach' END, x.partition::text, x.starts_at, x.ends_at
              FROM outbox.partitions(p.parent_table) x
             WHERE (x.ends_at < now() - p.retention
                    AND (x.detach_pending OR NOT outbox.is_followed(p.parent_table, x.starts_at, x.ends_at)))
                -- One that isn't recorded is being detached by hand.
                OR (x.detach_pending AND EXISTS (SELECT FROM outbox.retiring_partition r
                                                  WHERE to_regclass(r.partition) = x.partition AND r.detach_by IS NOT NULL))
             ORDER BY x.detach_pending DESC, x.starts_at
        LOOP
            reason := format('all of it is older than the retention of %s', p.retention);
            unsettled := NULL;
            -- FINALIZE may hold a lock on it while it waits.
            IF step = 'detach' THEN
                SELECT u.unsettled, u.described INTO unsettled, v_described
                  FROM outbox.describe_unsettled(p.parent_table, partition::regclass, starts_at, ends_at) AS u;
                IF unsettled IS DISTINCT FROM 0 THEN
                    step := 'hold';
                END IF;
            END IF;
            IF step = 'finalize' THEN
                reason := 'its detach is waiting for a transaction, or was interrupted';
                statement := format('ALTER TABLE %s DETACH PARTITION %s FINALIZE', p.parent_table, partition);
            ELSIF step = 'hold' THEN
                reason := reason || CASE WHEN unsettled IS NULL THEN ', but what finds its unsettled rows failed: ' || coalesce(v_described, 'locked')
                                         ELSE ', but it has ' || v_described END;
                statement := outbox.show_unsettled(p.parent_table, partition, starts_at, ends_at);
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
        statement := 'SELECT outbox.trim_foreign_receipts_batch()';
        RETURN NEXT;
    END IF;
    IF parent IS NULL AND v_clock IS NULL AND to_regclass('outbox.operation') IS NOT NULL THEN  -- which a later migration creates
        IF EXISTS (SELECT FROM outbox.operation o WHERE o.asked_at < now() - interval '90 days') THEN
            step := 'trim'; parent_table := 'outbox.operation'; partition := NULL; starts_at := NULL; ends_at := NULL; unsettled := NULL;
            reason := 'operations that were started more than 90 days ago';
            statement := 'SELECT outbox.trim_operations()';
            RETURN NEXT;
        END IF;
    END IF;
END
$body$;
COMMENT ON FUNCTION outbox.upkeep_plan IS
    'what the upkeep would do now, and why: make, drop, keep, attach, finalize, hold or detach a partition, trim, or refuse because of the clock';

-- Records what has expired, and completes detaches, in one transaction: it finalizes interrupted ones,
-- checks the rows and the policy again, then drops the table or attaches it again. A record stays as
-- long as its table: a job or a command that was planned earlier may still detach a partition that has
-- to stay by then. Returns what was done, by partition: `busy` if another session uses it, `failed` if
-- the failure was recorded; and `skipped`, without a partition, if another session is doing this.
CREATE FUNCTION outbox.finish_detached(parent text)
RETURNS TABLE (partition text, outcome text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET quote_all_identifiers = off
SET timezone = 'UTC'
SET datestyle = 'ISO, MDY'
SET intervalstyle = 'postgres'
SET lock_timeout = '100ms'
SET jit = off
AS $body$
DECLARE
    p outbox.partition_policy;
    v_clock text := outbox.clock_problem();
    v_newest timestamptz;
    v_leaving text[] := '{}';
    v_reason text;
    v_step text;
    v_context text;
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
    IF NOT pg_try_advisory_xact_lock(hashtextextended('outbox.finish_detached ' || parent, 0)) THEN
        RAISE NOTICE 'another upkeep is handling the detached partitions of %', parent
            USING HINT = 'nothing is wrong, unless pillarbox doctor names a foreign session that holds our locks';
        outcome := 'skipped';
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
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected OR undefined_table OR object_not_in_prerequisite_state THEN
                outcome := 'waiting';  -- as any detach may, for hours
            WHEN OTHERS OR query_canceled THEN
                outcome := 'failed';
                GET STACKED DIAGNOSTICS v_context = PG_EXCEPTION_CONTEXT;
                PERFORM outbox.note_failure(SQLERRM, 'finalize', parent, s.partition, SQLSTATE, v_context);
        END;
        RETURN NEXT;
    END LOOP;
    UPDATE outbox.retiring_partition r SET planned_at = NULL
     WHERE r.parent_table = parent AND r.planned_at IS NOT NULL AND r.partition <> ALL (v_leaving);
    DELETE FROM outbox.retiring_partition r WHERE r.parent_table = parent AND to_regclass(r.partition) IS NULL;
    DELETE FROM outbox.kept_partition k WHERE k.parent_table = parent AND to_regclass(k.partition) IS NULL;
    FOR partition IN
        DELETE FROM outbox.retiring_partition r
         WHERE r.parent_table = parent AND r.detach_by IS NULL
           AND EXISTS (SELECT FROM pg_class c WHERE c.oid = to_regclass(r.partition) AND NOT c.relispartition)
        RETURNING r.partition
    LOOP
        outcome := 'detached by hand, and left alone';
        RETURN NEXT;
    END LOOP;
    FOR s IN SELECT r.* FROM outbox.retiring_partition r JOIN pg_class c ON c.oid = to_regclass(r.partition)
              WHERE r.parent_table = parent AND r.detach_by IS NOT NULL AND NOT c.relispartition ORDER BY r.starts_at LOOP
        v_step := CASE WHEN p.keep_table THEN 'keep' ELSE 'drop' END;
        partition := s.partition;
        BEGIN
            -- Queries on the parent no longer reach it; queries on it wait for this lock.
            EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', s.partition);
            v_reason := CASE WHEN outbox.is_followed(parent, s.starts_at, s.ends_at) THEN format('rows of %s need it', p.follows)
                             WHEN (outbox.describe_unsettled(parent, s.partition::regclass, s.starts_at, s.ends_at)).unsettled IS DISTINCT FROM 0
                             THEN 'it has unsettled rows'
                             WHEN s.ends_at >= now() - p.retention THEN format('the retention of %s keeps it', p.retention) END;
            IF v_reason IS NOT NULL THEN
                v_step := 'attach';
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
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
                outcome := 'busy';
            WHEN OTHERS OR query_canceled THEN
                outcome := 'failed';
                GET STACKED DIAGNOSTICS v_context = PG_EXCEPTION_CONTEXT;
                PERFORM outbox.note_failure(SQLERRM, v_step, parent, s.partition, SQLSTATE, v_context);
        END;
        RETURN NEXT;
    END LOOP;
END
$body$;
COMMENT ON FUNCTION outbox.finish_detached IS
    'record what has expired, finalize interrupted detaches, drop detached partitions, and attach those again that must stay';

-- A run that could not connect has no times: it goes with those before and after it.
CREATE FUNCTION outbox.trim_cron_log() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET row_security = on  -- pg_cron's policies show each role its own jobs
AS $body$
DECLARE
    v_before timestamptz := now() - interval '14 days';
BEGIN
    DELETE FROM cron.job_run_details d
     WHERE d.username = current_user
       AND (coalesce(d.start_time, d.end_time) < v_before
            OR coalesce(d.start_time, d.end_time) IS NULL
               AND d.runid < (SELECT max(q.runid) FROM cron.job_run_details q
                               WHERE q.username = current_user AND q.start_time < v_before));
END
$body$;
COMMENT ON FUNCTION outbox.trim_cron_log IS 'delete what pg_cron recorded of runs of this role''s jobs more than 14 days ago';

-- Runs as the detacher, since cron.schedule() records the current user. pg_cron has no one-shot jobs:
-- these name a minute of the hour, which needs no time zone (only administrators can read
-- cron.timezone), and the next run, an hour later, unschedules them.
CREATE FUNCTION outbox.schedule_detaches() RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET row_security = on
SET quote_all_identifiers = off
AS $body$
DECLARE
    -- The launcher may only see a new job in the next minute.
    v_first int := extract(minute FROM now() + interval '10 seconds');
    v_count int := 0;
    v_name text;
    s record;
BEGIN
    FOR s IN
        SELECT j.jobid, j.jobname, j.command, r.parent_table, r.partition, coalesce(d.return_message, 'its job failed') AS failure,
               outbox.detach_under_way() AND x.inhdetachpending AS runs,
               d.status = 'failed' AND NOT x.inhdetachpending AS failed
          FROM cron.job j
          LEFT JOIN outbox.retiring_partition r
            ON j.command = format('ALTER TABLE %s DETACH PARTITION %s CONCURRENTLY', r.parent_table, r.partition)
          LEFT JOIN pg_inherits x ON x.inhrelid = to_regclass(r.partition)
          LEFT JOIN LATERAL (
               SELECT q.status, q.return_message FROM cron.job_run_details q WHERE q.jobid = j.jobid ORDER BY q.runid DESC LIMIT 1) d ON true
         WHERE j.jobname LIKE 'pillarbox detach %' AND j.database = current_database() AND j.username = current_user
    LOOP
        IF s.failed THEN
            PERFORM outbox.note_failure(s.failure, 'detach', s.parent_table, s.partition);
        END IF;
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
    PERFORM outbox.upkeep_step('finish', p.parent_table, '{}', '0', 0, 2, false)
       FROM (SELECT q.* FROM outbox.partition_policy q ORDER BY q.follows NULLS FIRST, q.parent_table) p;
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
        v_name := format('pillarbox detach %s of %s', s.partition, current_database());
        IF octet_length(v_name) > 63 THEN
            v_name := format('pillarbox detach %s of %s', s.partition, left(md5(current_database()), 8));
        END IF;
        PERFORM cron.schedule(v_name, format('%s * * * *', (v_first + s.turn) % 60), s.statement);
        UPDATE outbox.retiring_partition r SET detach_by = 'pg_cron' WHERE r.partition = s.partition;
        v_count := v_count + 1;
    END LOOP;
    PERFORM outbox.trim_cron_log();
    RETURN v_count;
END
$body$;
COMMENT ON FUNCTION outbox.schedule_detaches IS
    'schedule a pg_cron job for each expired partition, one per minute, to detach it; returns how many';
RESET ROLE;
