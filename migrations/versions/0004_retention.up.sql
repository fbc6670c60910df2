-- Owner part: retention without stalling writers: which partitions may be dropped, their detach, and
-- their drop.

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
LANGUAGE sql STABLE {pinned}
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
LANGUAGE sql STABLE {pinned}
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
LANGUAGE plpgsql STABLE SECURITY DEFINER {pinned}
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

-- Messages of a partition that readers of topics have not read. Only readers with a message there count: one search of
-- the topics for each subscription. Below the position of a reader in a lane, only rows whose transaction hadn't
-- ended at its claim can be uncovered; and none are below it, if it lies before the first row of the lane.
CREATE FUNCTION outbox.unread_messages(partition regclass, starts_at timestamptz, ends_at timestamptz, at_most integer)
RETURNS TABLE (id uuid, created_at timestamptz, seq bigint, lane smallint, topic text, key text, tenant text, cause text, reader text)
LANGUAGE plpgsql STABLE ROWS 10 {pinned}
SET enable_seqscan = off  -- stale statistics can make a sequential scan look cheap
SET enable_bitmapscan = on  -- its caller may have turned these off
SET enable_nestloop = on
SET jit = off
AS $body$
BEGIN
    RETURN QUERY EXECUTE format($query$
        WITH base AS MATERIALIZED (
            SELECT max(b.seq) AS seq FROM outbox.base AS b
        ), reader AS MATERIALIZED (
            SELECT s.reader, min(s.since_seq) AS since_seq,
                   (array_agg(s.since ORDER BY pg_snapshot_xmax(s.since), pg_column_size(s.since) DESC))[1] AS since
              FROM outbox.subscription AS s
             CROSS JOIN LATERAL (
                   -- No character is higher.
                   SELECT CASE WHEN right(s.topic, 1) = '*' THEN left(s.topic, -1) ELSE s.topic END,
                          CASE WHEN right(s.topic, 1) = '*' THEN left(s.topic, -1) || chr(1114111) ELSE s.topic END
                   ) AS t (first, last)
             WHERE s.ended_at IS NULL AND NOT s.is_discarded
             GROUP BY s.reader
            HAVING NOT bool_or(s.topic = '*' AND s.since_seq = -1)
               AND bool_or(EXISTS (SELECT FROM %1$s AS m WHERE m.topic COLLATE "C" BETWEEN t.first AND t.last
                                    ORDER BY m.topic COLLATE "C" LIMIT 1))
        ), lane AS MATERIALIZED (
            SELECT l.lane, f.seq AS first_seq
              FROM generate_series(0, 47) AS l (lane)
             CROSS JOIN LATERAL (SELECT m.seq FROM %1$s AS m WHERE m.lane = l.lane ORDER BY m.seq LIMIT 1) AS f
        ), position AS MATERIALIZED (
            SELECT r.reader, l.lane, l.first_seq, coalesce(q.up_to, r.since_seq) AS up_to,
                   coalesce(q.snapshot, r.since) AS snapshot, q.late_up_to, q.late_snapshot
              FROM reader AS r
             CROSS JOIN lane AS l
              LEFT JOIN LATERAL (
                   SELECT p.* FROM outbox.position AS p
                    WHERE p.reader = r.reader AND p.lane = l.lane AND p.created_at = $1
                    ORDER BY p.number DESC
                    LIMIT 1
                   ) AS q ON true
        ), uncovered AS (
            SELECT p.reader, 'unclaimed' AS cause, m.*
              FROM (SELECT p.lane, min(p.up_to) AS up_to FROM position AS p GROUP BY p.lane) AS l
             CROSS JOIN LATERAL (SELECT * FROM %1$s AS q WHERE q.lane = l.lane AND q.seq > l.up_to OFFSET 0) AS m
              JOIN position AS p ON p.lane = m.lane AND m.seq > p.up_to
             UNION ALL
            SELECT p.reader, 'inserted late', m.*
              FROM (SELECT * FROM %1$s AS q
                     WHERE (q.xid::text)::bigint >= (SELECT min(pg_snapshot_xmin(p.snapshot)::text::bigint)
                                                       FROM position AS p WHERE p.up_to >= p.first_seq) OFFSET 0) AS m
              JOIN position AS p ON p.lane = m.lane AND m.seq <= p.up_to
             WHERE NOT (m.seq <= (SELECT b.seq FROM base AS b) OR pg_visible_in_snapshot(m.xid, p.snapshot)
                        OR coalesce(m.seq <= p.late_up_to AND pg_visible_in_snapshot(m.xid, p.late_snapshot), false))
        )
        SELECT m.id, m.created_at, m.seq, m.lane, m.topic, m.key, m.tenant, m.cause, m.reader
          FROM uncovered AS m
         WHERE EXISTS (SELECT FROM outbox.subscription AS s
                        WHERE s.reader = m.reader AND outbox.brings(s, m.topic, m.seq, m.xid, (SELECT b.seq FROM base AS b)))
           AND (SELECT true FROM outbox.deferral AS d
                 WHERE d.id = m.id AND d.created_at = m.created_at AND d.created_at >= $1 AND d.created_at < $2
                   AND (d.reader = m.reader) IS TRUE LIMIT 1) IS NULL
         LIMIT $3 $query$, partition) USING starts_at, ends_at, at_most;
END
$body$;
COMMENT ON FUNCTION outbox.unread_messages IS
    'messages of a partition that readers of topics have not claimed, up to at_most; cause is unclaimed, or inserted late (below the position)';

-- The gate of outbox.message, for each reader. Positions count the messages that they cover. In a lane
-- where the counts agree, only messages in the log can be unsettled. The others are read: for messages that
-- aren't covered, and if there are none, for those that were covered without being claimed. These committed
-- after a position had passed them, or else any can be one; an entry 'settled', as a replay gets it, accounts
-- for them. A reader that gets only some of the messages has no such count: see outbox.unread_messages.
CREATE FUNCTION outbox.unsettled_messages(partition regclass, starts_at timestamptz, ends_at timestamptz, at_most integer DEFAULT 1000)
RETURNS TABLE (id uuid, created_at timestamptz, seq bigint, lane smallint, topic text, key text, tenant text, cause text, reader text)
LANGUAGE plpgsql STABLE {pinned}
SET enable_seqscan = off  -- the narrow indexes instead of the rows; stale statistics can make a sequential scan look cheap
SET enable_bitmapscan = off
SET enable_nestloop = off  -- stale statistics can make it look cheap to read the log once per row
SET jit = off  -- the estimated cost may be high enough for it
AS $body$
DECLARE
    v_base bigint := (SELECT max(b.seq) FROM outbox.base AS b);
    v_lanes smallint[];
    v_passed smallint[];
    v_left integer := at_most;
    v_found integer;
    v_reader record;
BEGIN
    RETURN QUERY EXECUTE format($query$
        SELECT m.id, m.created_at, m.seq, m.lane, m.topic, m.key, m.tenant, e.cause, e.reader
          FROM (SELECT DISTINCT ON (d.id, d.reader) d.id, d.created_at, d.cause, d.reader
                  FROM outbox.deferral AS d
                 WHERE d.created_at >= $1 AND d.created_at < $2 AND d.cause <> 'settled'
                   AND NOT EXISTS (SELECT FROM outbox.deferral AS s
                                    WHERE s.id = d.id AND s.run >= d.run AND s.cause = 'settled' AND s.reader = d.reader
                                      AND s.created_at >= $1 AND s.created_at < $2)
                 ORDER BY d.id, d.reader, d.run DESC, d.entry DESC) AS e
         CROSS JOIN LATERAL (SELECT * FROM %s AS q WHERE q.id = e.id AND q.created_at = e.created_at LIMIT 1) AS m
         WHERE EXISTS (SELECT FROM outbox.subscription AS s WHERE s.reader = e.reader AND s.ended_at IS NULL)
         LIMIT $3 $query$, partition) USING starts_at, ends_at, v_left;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    v_left := v_left - v_found;
    FOR v_reader IN
        SELECT s.reader AS name
          FROM outbox.subscription AS s
         WHERE s.ended_at IS NULL AND NOT s.is_discarded AND s.topic = '*' AND s.since_seq = -1
    LOOP
        EXECUTE format($query$
            SELECT array_agg(l.lane), array_agg(l.lane) FILTER (WHERE counted.messages > coalesce(covered.messages, 0))
              FROM generate_series(0, 47) AS l (lane)
              LEFT JOIN (SELECT p.lane, sum(p.messages) FROM outbox.position AS p
                          WHERE p.reader = $2 AND p.created_at = $1 GROUP BY p.lane) AS covered (lane, messages) ON covered.lane = l.lane
             CROSS JOIN LATERAL (SELECT count(*) FROM %s AS m WHERE m.lane = l.lane) AS counted (messages)
             WHERE counted.messages <> coalesce(covered.messages, 0) $query$, partition)
            INTO v_lanes, v_passed USING starts_at, v_reader.name;
        RETURN QUERY EXECUTE format($query$
            SELECT m.id, m.created_at, m.seq, m.lane, m.topic, m.key, m.tenant,
                   CASE WHEN m.seq <= (p.last).up_to THEN 'inserted late' ELSE 'unclaimed' END, $5
              FROM unnest($1) AS l (lane)
              LEFT JOIN LATERAL (SELECT q FROM outbox.position AS q WHERE q.reader = $5 AND q.lane = l.lane AND q.created_at = $2
                                  ORDER BY q.number DESC LIMIT 1) AS p (last) ON true
             CROSS JOIN LATERAL (SELECT * FROM %s AS q WHERE q.lane = l.lane AND outbox.covers(p.last, q.seq, q.xid, $3) IS NOT TRUE OFFSET 0) AS m
             WHERE (SELECT true FROM outbox.deferral AS d
                     WHERE d.id = m.id AND d.created_at = m.created_at AND (d.reader = $5) IS TRUE LIMIT 1) IS NULL
             LIMIT $4 $query$, partition) USING v_lanes, starts_at, v_base, v_left, v_reader.name;
        GET DIAGNOSTICS v_found = ROW_COUNT;
        v_left := v_left - v_found;
        IF v_found = 0 THEN
            RETURN QUERY EXECUTE format($query$
                SELECT r.id, r.created_at, r.seq, r.lane, r.topic, r.key, r.tenant, 'passed', $5
                  FROM (SELECT m.*, rank() OVER (PARTITION BY m.lane ORDER BY p.sees) AS likely
                          FROM unnest($1) AS l (lane)
                         CROSS JOIN LATERAL (SELECT * FROM %s AS q WHERE q.lane = l.lane OFFSET 0) AS m
                         CROSS JOIN LATERAL (SELECT outbox.covers(q, m.seq, m.xid, $3) FROM outbox.position AS q
                                              WHERE q.reader = $5 AND q.lane = m.lane AND q.created_at = $2 AND q.up_to >= m.seq
                                              ORDER BY q.up_to, q.number LIMIT 1) AS p (sees)) AS r
                 WHERE r.likely = 1
                   AND (SELECT true FROM outbox.deferral AS d
                         WHERE d.id = r.id AND d.created_at = r.created_at AND (d.reader = $5) IS TRUE LIMIT 1) IS NULL
                 LIMIT $4 $query$, partition) USING v_passed, starts_at, v_base, v_left, v_reader.name;
            GET DIAGNOSTICS v_found = ROW_COUNT;
            v_left := v_left - v_found;
        END IF;
    END LOOP;
    RETURN QUERY SELECT u.* FROM outbox.unread_messages(partition, starts_at, ends_at, v_left) AS u;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    RETURN QUERY
    SELECT u.id, u.created_at, u.seq, u.lane, u.topic, u.key, u.tenant, 'unrouted', NULL::text
      FROM outbox.unrouted_in(partition::text, starts_at, ends_at, v_left - v_found) AS u;
END
$body$;
COMMENT ON FUNCTION outbox.unsettled_messages IS
    'the messages of a partition that are neither published nor dead-lettered by each reader, and those to be published again, up to at_most; cause is that of the last entry in the log, or unclaimed, inserted late (below the position), passed (perhaps never claimed: more messages are covered than were claimed), or unrouted (no reader gets it)';

-- For people: no values of the rows except their ids. Reads all rows once, which can take long.
CREATE FUNCTION outbox.what_keeps(parent text, partition regclass, starts_at timestamptz, ends_at timestamptz,
                                  OUT unsettled bigint, OUT reason text)
LANGUAGE plpgsql STABLE {pinned}
{utc}
SET enable_seqscan = off  -- stale statistics can make a sequential scan look cheap
SET jit = off  -- the estimated cost may be high enough for it
AS $body$
DECLARE
    p outbox.partition_policy;
    v_rows jsonb[];
BEGIN
    SELECT * INTO STRICT p FROM outbox.partition_policy q WHERE q.parent_table = parent;
    IF p.unsettled IS NOT NULL THEN
        EXECUTE format('SELECT array_agg(to_jsonb(u)) FROM (SELECT %s FROM %s WHERE %s LIMIT 1000) AS u',
                       (SELECT string_agg(quote_ident(a.attname), ', ') FROM pg_attribute a
                         WHERE a.attrelid = partition AND a.attname IN ('id', 'message_id', 'consumer', 'created_at', 'message_at')),
                       partition, p.unsettled) INTO v_rows;
    ELSIF p.gate IS NOT NULL THEN
        EXECUTE format('SELECT array_agg(to_jsonb(u)) FROM %s($1, $2, $3, 1000) AS u', p.gate) INTO v_rows USING partition, starts_at, ends_at;
    END IF;
    unsettled := coalesce(cardinality(v_rows), 0);
    IF unsettled > 0 THEN
        SELECT format('unsettled rows: %s%s, for example %s of %s', CASE unsettled WHEN 1000 THEN 'at least 1000' ELSE unsettled::text END,
                      ' (' || string_agg(DISTINCT nullif(concat_ws(' of ', r ->> 'cause', coalesce(r ->> 'consumer', nullif(r ->> 'reader', 'main'))), ''), ', ') || ')',
                      min(coalesce(r ->> 'id', r ->> 'message_id')), min(coalesce(r ->> 'created_at', r ->> 'message_at')))
          INTO reason FROM unnest(v_rows) AS r;
    ELSIF outbox.is_followed(parent, starts_at, ends_at) THEN
        reason := format('rows of %s need it', p.follows);
    ELSIF ends_at >= now() - p.retention THEN
        reason := format('the retention of %s is not over', p.retention);
    END IF;
EXCEPTION WHEN OTHERS THEN
    unsettled := NULL;
    reason := 'its unsettled rows can''t be found: ' || outbox.without_row(SQLERRM, SQLSTATE);
END
$body$;
COMMENT ON FUNCTION outbox.what_keeps IS
    'how many unsettled rows a partition has, counted up to 1,000 (null: unknown), and why it is not dropped (null: it can be)';

CREATE FUNCTION outbox.upkeep_plan(parent text DEFAULT NULL)
RETURNS TABLE (step text, parent_table text, partition text, starts_at timestamptz, ends_at timestamptz,
               unsettled bigint, reason text, statement text)
LANGUAGE plpgsql STABLE SECURITY DEFINER {pinned}
SET quote_all_identifiers = off
{utc}
SET jit = off
AS $body$
DECLARE
    p outbox.partition_policy;
    v_clock text := outbox.clock_problem();
    x record;
BEGIN
    FOR p IN
        SELECT q.* FROM outbox.partition_policy q
         WHERE q.parent_table = coalesce(parent, q.parent_table) AND to_regclass(q.parent_table) IS NOT NULL
         ORDER BY q.parent_table
    LOOP
        parent_table := p.parent_table; partition := NULL; unsettled := NULL;
        step := 'make';
        reason := 'there is no partition for these rows';
        statement := format('SELECT outbox.make_partitions(%L)', p.parent_table);
        FOR starts_at, ends_at IN SELECT m.starts_at, m.ends_at FROM outbox.missing_partitions(p.parent_table) m LOOP
            RETURN NEXT;
        END LOOP;
        FOR x IN
            SELECT r.partition, r.starts_at, r.ends_at, true AS is_detached, false AS is_pending
              FROM outbox.retiring_partition r JOIN pg_class c ON c.oid = to_regclass(r.partition)
             WHERE r.parent_table = p.parent_table AND NOT c.relispartition
             UNION ALL
            SELECT q.partition::text, q.starts_at, q.ends_at, false, q.detach_pending
              FROM outbox.partitions(p.parent_table) q
             WHERE (q.ends_at < now() - p.retention
                    AND (q.detach_pending OR NOT outbox.is_followed(p.parent_table, q.starts_at, q.ends_at)))
                -- One that isn't recorded is being detached by hand.
                OR (q.detach_pending AND EXISTS (SELECT FROM outbox.retiring_partition r
                                                  WHERE to_regclass(r.partition) = q.partition))
             ORDER BY 4 DESC, 5 DESC, 2
        LOOP
            partition := x.partition; starts_at := x.starts_at; ends_at := x.ends_at; unsettled := NULL;
            -- FINALIZE may hold a lock on it while it waits.
            IF x.is_pending THEN
                step := 'finalize';
                reason := 'its detach is waiting for a transaction, or was interrupted';
                statement := format('ALTER TABLE %s DETACH PARTITION %s FINALIZE', p.parent_table, partition);
                RETURN NEXT;
                CONTINUE;
            END IF;
            SELECT k.unsettled, k.reason INTO unsettled, reason FROM outbox.what_keeps(p.parent_table, partition::regclass, starts_at, ends_at) AS k;
            IF reason IS NOT NULL THEN
                step := CASE WHEN x.is_detached THEN 'attach' ELSE 'hold' END;
            ELSIF v_clock IS NOT NULL THEN
                step := 'refuse';
                reason := v_clock;
            ELSE
                step := CASE WHEN NOT x.is_detached THEN 'detach' WHEN p.keep_table THEN 'keep' ELSE 'drop' END;
                reason := format('its retention of %s is over, and nothing in it is unsettled', p.retention);
            END IF;
            statement := CASE step
                WHEN 'attach' THEN format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)', p.parent_table, partition, starts_at, ends_at)
                WHEN 'hold' THEN CASE WHEN p.gate IS NULL THEN format('SELECT * FROM %s WHERE %s', partition, p.unsettled)
                                      ELSE format('SELECT * FROM %s(%L, %L, %L)', p.gate, partition, starts_at, ends_at) END
                WHEN 'refuse' THEN 'SELECT outbox.accept_clock()'
                WHEN 'detach' THEN format('ALTER TABLE %s DETACH PARTITION %s CONCURRENTLY', p.parent_table, partition)
                WHEN 'keep' THEN format('SELECT * FROM outbox.finish_detached(%L)', p.parent_table)
                ELSE format('DROP TABLE %s', partition) END;
            RETURN NEXT;
        END LOOP;
    END LOOP;
    IF parent IS NULL AND v_clock IS NULL THEN
        step := 'trim'; partition := NULL; starts_at := NULL; ends_at := NULL; unsettled := NULL;
        FOR parent_table, reason IN
            SELECT 'inbox.foreign_receipt', format('rows older than the retention of inbox.receipt, %s', q.retention)
              FROM outbox.partition_policy q
             WHERE q.parent_table = 'inbox.receipt' AND EXISTS (SELECT FROM inbox.foreign_receipt f WHERE f.received_at < now() - q.retention)
             UNION ALL
            SELECT 'outbox.operation', 'operations that were started more than 90 days ago'
             WHERE EXISTS (SELECT FROM outbox.operation o WHERE o.asked_at < now() - interval '90 days' AND (o.kind <> 'pause' OR o.state <> 'running'))
        LOOP
            statement := format('SELECT outbox.trim_batch(%L)', parent_table);
            RETURN NEXT;
        END LOOP;
    END IF;
END
$body$;
COMMENT ON FUNCTION outbox.upkeep_plan IS
    'what the upkeep would do now, and why: make, drop, keep, attach, finalize, hold or detach a partition, trim, or refuse because of the clock';

-- Completes detaches, in one transaction: finalizes interrupted ones, checks the rows and the policy again, then
-- drops the table or attaches it again. Only partitions whose detach was recorded before are dropped: any other
-- one was detached by hand. Returns the outcome for each partition: `failed` if the failure was recorded; and
-- `skipped`, without a partition, if another session is doing this.
CREATE FUNCTION outbox.finish_detached(parent text)
RETURNS TABLE (partition text, outcome text)
LANGUAGE plpgsql SECURITY DEFINER {pinned}
SET quote_all_identifiers = off
{utc}
SET lock_timeout = '100ms'
SET jit = off
AS $body$
DECLARE
    p outbox.partition_policy;
    v_clock text := outbox.clock_problem();
    v_newest timestamptz;
    v_reason text;
    v_step text;
    v_context text;
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
    FOR s IN SELECT q.* FROM outbox.upkeep_plan(parent) q WHERE q.step IN ('finalize', 'hold') LOOP
        IF s.step = 'hold' AND s.unsettled IS NULL THEN
            PERFORM outbox.note_failure(s.reason, 'retention', parent, s.partition);
        ELSIF s.step = 'hold' THEN
            RAISE WARNING 'partition % is held: %', s.partition, s.reason USING HINT = s.statement;
        END IF;
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
    DELETE FROM outbox.retiring_partition r WHERE r.parent_table = parent AND to_regclass(r.partition) IS NULL;
    DELETE FROM outbox.kept_partition k WHERE k.parent_table = parent AND to_regclass(k.partition) IS NULL;
    FOR s IN SELECT r.* FROM outbox.retiring_partition r JOIN pg_class c ON c.oid = to_regclass(r.partition)
              WHERE r.parent_table = parent AND NOT c.relispartition ORDER BY r.starts_at LOOP
        v_step := CASE WHEN p.keep_table THEN 'keep' ELSE 'drop' END;
        partition := s.partition;
        BEGIN
            -- Queries on the parent no longer reach it; queries on it wait for this lock.
            EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', s.partition);
            v_reason := (outbox.what_keeps(parent, s.partition::regclass, s.starts_at, s.ends_at)).reason;
            IF v_reason IS NOT NULL THEN
                v_step := 'attach';
                EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                               parent::regclass, s.partition, s.starts_at, s.ends_at);
                outcome := 'attached again';
                -- A job may still be scheduled.
                DELETE FROM outbox.retiring_partition r WHERE r.partition = s.partition AND r.detach_by <> 'pg_cron';
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
                    EXECUTE (SELECT format('ALTER TABLE %s %s', s.partition, string_agg(c.change, ', '))
                               FROM (SELECT format('ALTER %I DROP DEFAULT', a.attname) FROM pg_attribute a
                                      WHERE a.attrelid = s.partition::regclass AND a.atthasdef
                                      UNION ALL
                                     SELECT format('DROP CONSTRAINT %I', q.conname) FROM pg_constraint q
                                      WHERE q.conrelid = s.partition::regclass AND q.contype = 'c') AS c (change));
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
                outcome := 'in use, and left for the next run';
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
    'finalize interrupted detaches, drop detached partitions, and attach those again that must stay';

-- A run that could not connect has no times: it goes with those before and after it.
CREATE FUNCTION outbox.trim_cron_log() RETURNS void
LANGUAGE plpgsql {pinned}
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
LANGUAGE plpgsql {pinned}
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
    DELETE FROM outbox.retiring_partition r
     WHERE r.detach_by = 'pg_cron'
       AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = to_regclass(r.partition) AND NOT i.inhdetachpending);
    PERFORM outbox.upkeep_step('retention', p.parent_table)
       FROM (SELECT q.* FROM outbox.partition_policy q ORDER BY q.follows NULLS FIRST, q.parent_table) p;
    FOR s IN
        SELECT p.*, row_number() OVER (PARTITION BY p.parent_table ORDER BY p.starts_at) AS turn
          FROM outbox.upkeep_plan() p
         WHERE p.step = 'detach'
           -- A table can have only one pending detach.
           AND NOT EXISTS (SELECT FROM outbox.partitions(p.parent_table) x WHERE x.detach_pending)
    LOOP
        CONTINUE WHEN s.turn > 50;  -- the rest in the next hour
        v_name := format('pillarbox detach %s of %s', s.partition, current_database());
        IF octet_length(v_name) > 63 THEN
            v_name := format('pillarbox detach %s of %s', s.partition, left(md5(current_database()), 8));
        END IF;
        PERFORM cron.schedule(v_name, format('%s * * * *', (v_first + s.turn) % 60), s.statement);
        INSERT INTO outbox.retiring_partition (partition, parent_table, starts_at, ends_at, detach_by)
        VALUES (s.partition, s.parent_table, s.starts_at, s.ends_at, 'pg_cron')
            ON CONFLICT (partition) DO UPDATE SET detach_by = excluded.detach_by;
        v_count := v_count + 1;
    END LOOP;
    UPDATE outbox.upkeep SET detached_at = clock_timestamp();
    PERFORM outbox.trim_cron_log();
    RETURN v_count;
END
$body$;
COMMENT ON FUNCTION outbox.schedule_detaches IS
    'schedule a pg_cron job for each expired partition, one per minute, to detach it; returns how many';
