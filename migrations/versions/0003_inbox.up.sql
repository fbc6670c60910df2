-- Owner part: the inbox. Receipts, the queue of the postgres broker, dead letters.

SET LOCAL ROLE {owner};

CREATE FUNCTION inbox.moment_of(id uuid) RETURNS timestamptz
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN '1970-01-01 00:00:00+00'::timestamptz
    + (('x' || encode(substring(uuid_send(id) FROM 1 FOR 6), 'hex'))::bit(48)::bigint)::double precision
    * interval '1 millisecond';
COMMENT ON FUNCTION inbox.moment_of IS 'the time in a UUIDv7, to the millisecond';

CREATE TABLE inbox.receipt (
    message_id  uuid        NOT NULL,
    message_at  timestamptz NOT NULL,
    received_at timestamptz NOT NULL DEFAULT now(),
    consumer    text        NOT NULL,
    CONSTRAINT receipt_pkey PRIMARY KEY (message_id, consumer, message_at),
    -- The body of inbox.moment_of(): every INSERT would inline the function again, which took a
    -- third of its time (0.17 to 0.24 ms instead of 0.14 to 0.15).
    CONSTRAINT message_at_from_id CHECK (
        get_byte(uuid_send(message_id), 6) >> 4 = 7
        AND message_at = '1970-01-01 00:00:00+00'::timestamptz
            + (('x' || encode(substring(uuid_send(message_id) FROM 1 FOR 6), 'hex'))::bit(48)::bigint)::double precision
            * interval '1 millisecond')
) PARTITION BY RANGE (message_at);
COMMENT ON TABLE inbox.receipt IS 'proof that a consumer has handled a message, committed with the handler''s effects';
COMMENT ON COLUMN inbox.receipt.message_at IS
    'a function of message_id, enforced by a CHECK: so the id alone is unique across all partitions';
CREATE TABLE inbox.receipt_template (LIKE inbox.receipt INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
-- Rows are never updated: freeze them early instead of all at once before a wraparound.
ALTER TABLE inbox.receipt_template SET (autovacuum_vacuum_insert_scale_factor = 0.1);

CREATE TABLE inbox.foreign_receipt (
    source      text        NOT NULL,
    message_id  text        NOT NULL,
    consumer    text        NOT NULL,
    received_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT foreign_receipt_pkey PRIMARY KEY (source, message_id, consumer)
);
CREATE INDEX foreign_receipt_age_idx ON inbox.foreign_receipt (received_at);
COMMENT ON TABLE inbox.foreign_receipt IS
    'receipts for ids that aren''t UUIDv7 (a Stripe event, a Kafka offset): not partitioned, trimmed in small batches';

CREATE TABLE inbox.subscription (
    consumer   text        NOT NULL,
    topic      text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT subscription_pkey PRIMARY KEY (consumer, topic),
    CONSTRAINT names_not_empty CHECK (consumer <> '' AND topic <> ''),
    CONSTRAINT star_only_at_the_end CHECK (position('*' IN topic) IN (0, length(topic)))
);
COMMENT ON TABLE inbox.subscription IS 'the topics of each consumer of the postgres broker';
COMMENT ON COLUMN inbox.subscription.topic IS 'a topic, or a prefix followed by *';

CREATE SEQUENCE inbox.delivery_seq AS bigint CACHE 1;

CREATE TABLE inbox.delivery (
    -- As for outbox.message.seq: the transaction is assigned its id first.
    seq            bigint      NOT NULL DEFAULT CASE WHEN pg_current_xact_id() IS NOT NULL
                                                     THEN nextval('inbox.delivery_seq'::regclass) END,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    message_id     uuid        NOT NULL,
    lane           smallint    NOT NULL,
    schema_version integer     NOT NULL,
    consumer       text        NOT NULL,
    topic          text        NOT NULL,
    key            text,
    tenant         text,
    content_type   text        NOT NULL,
    headers        jsonb       NOT NULL,
    payload        bytea       NOT NULL,
    CONSTRAINT delivery_pkey PRIMARY KEY (seq, created_at),
    CONSTRAINT lane_exists CHECK (lane BETWEEN 0 AND 15)
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE inbox.delivery IS
    'the queue of the postgres broker: one row per message and subscribed consumer, never updated; inbox.ack and inbox.redelivery say what became of it';

-- The claim: the rows of a consumer's lane, in order.
CREATE INDEX delivery_lane_idx ON inbox.delivery (consumer, lane, seq);
-- For claims that take turns between tenants, so that one tenant's flood doesn't delay the others.
CREATE INDEX delivery_tenant_idx ON inbox.delivery (consumer, tenant, lane, seq) WHERE tenant IS NOT NULL;
-- For lives. UUIDv7s ascend almost in the order of the inserts, so a message is in one of a few ranges
-- of pages. The index costs an insert next to nothing, and autovacuum summarizes it range by range.
CREATE INDEX delivery_message_idx ON inbox.delivery USING brin (message_id uuid_minmax_multi_ops)
    WITH (pages_per_range = 64, autosummarize = on);
CREATE TABLE inbox.delivery_template (LIKE inbox.delivery INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
-- Rows are only inserted, here and in the tables below: as for outbox.message.
ALTER TABLE inbox.delivery_template SET (
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.05
);

-- A mark: deliveries of one consumer and lane that were acked together. Partitions begin and end at
-- multiples of 15 minutes in every time zone, so a mark is in the partition of its deliveries. A seq
-- and its moment are the delivery's primary key: so even after the sequence was set back, no mark can
-- be mistaken for another delivery's.
CREATE TABLE inbox.ack (
    created_at timestamptz   NOT NULL,
    acked_at   timestamptz   NOT NULL DEFAULT clock_timestamp(),
    first_seq  bigint        NOT NULL,
    last_seq   bigint        NOT NULL,
    lane       smallint      NOT NULL,
    consumer   text          NOT NULL,
    seqs       bigint[]      NOT NULL,
    moments    timestamptz[] NOT NULL,
    CONSTRAINT created_at_in_bins CHECK (created_at = date_bin('15 minutes', created_at, '2000-01-01 00:00:00+00')),
    CONSTRAINT lane_exists CHECK (lane BETWEEN 0 AND 15),
    -- Queries search for the marks of a seq no further than this.
    CONSTRAINT stretch_limited CHECK (last_seq - first_seq BETWEEN 0 AND 4095),
    CONSTRAINT one_moment_each CHECK (cardinality(seqs) = cardinality(moments) AND cardinality(seqs) > 0)
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE inbox.ack IS
    'marks: one row for the deliveries of a consumer and lane that were acked together, never updated; a second mark for a delivery changes nothing';
COMMENT ON COLUMN inbox.ack.created_at IS 'when the deliveries were created, rounded down to 15 minutes';
COMMENT ON COLUMN inbox.ack.moments IS 'created_at of each delivery; seqs has their seqs in the same order';
CREATE INDEX ack_lane_idx ON inbox.ack (consumer, lane, last_seq);
CREATE TABLE inbox.ack_template (LIKE inbox.ack INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
ALTER TABLE inbox.ack_template SET (
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.05
);

CREATE SEQUENCE inbox.redelivery_entry_seq AS bigint CACHE 1;
COMMENT ON SEQUENCE inbox.redelivery_entry_seq IS 'order of the entries of inbox.redelivery';

-- What happened to each delivery that wasn't acked when it was first claimed. It waits until it has
-- an entry 'acked', whatever entries arrive later.
CREATE TABLE inbox.redelivery (
    created_at timestamptz NOT NULL,
    -- As for outbox.message.seq: the transaction is assigned its id first.
    entry      bigint      NOT NULL DEFAULT CASE WHEN pg_current_xact_id() IS NOT NULL
                                                 THEN nextval('inbox.redelivery_entry_seq'::regclass) END,
    entered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    due_at     timestamptz,
    seq        bigint      NOT NULL,
    attempts   integer     NOT NULL DEFAULT 0,
    lane       smallint    NOT NULL,
    cause      text        NOT NULL,
    consumer   text        NOT NULL,
    key        text,
    CONSTRAINT redelivery_pkey PRIMARY KEY (consumer, lane, entry, created_at),
    CONSTRAINT lane_exists CHECK (lane BETWEEN 0 AND 15),
    CONSTRAINT attempts_not_negative CHECK (attempts >= 0),
    CONSTRAINT cause_known CHECK (cause IN ('refused', 'blocked', 'open', 'found', 'acked')),
    CONSTRAINT due_unless_blocked_or_acked CHECK ((due_at IS NULL) = (cause IN ('blocked', 'acked'))),
    CONSTRAINT blocked_by_its_key CHECK (cause <> 'blocked' OR key IS NOT NULL)
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE inbox.redelivery IS
    'a log, never updated: the deliveries that were given back or wait behind another one of their key, and until when';
COMMENT ON COLUMN inbox.redelivery.created_at IS 'when the delivery was created';
COMMENT ON COLUMN inbox.redelivery.cause IS
    'refused: the consumer gave it back; blocked: a delivery of its key waits; open: after a minute it had neither a mark nor an entry; found: it was inserted below a watermark; acked: it waits no longer';
COMMENT ON COLUMN inbox.redelivery.attempts IS 'how often the consumer has failed to handle it';
COMMENT ON COLUMN inbox.redelivery.due_at IS 'when to deliver it again; null: when its key is free, or never (acked)';
CREATE INDEX redelivery_delivery_idx ON inbox.redelivery (seq, entry);
CREATE INDEX redelivery_key_idx ON inbox.redelivery (consumer, lane, key, seq) WHERE key IS NOT NULL AND cause <> 'acked';
CREATE INDEX redelivery_due_idx ON inbox.redelivery (due_at) WHERE due_at IS NOT NULL;
CREATE TABLE inbox.redelivery_template (LIKE inbox.redelivery INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
ALTER TABLE inbox.redelivery_template SET (
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.05
);

CREATE TABLE inbox.watermark (
    created_at timestamptz NOT NULL,
    raised_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    above      bigint      NOT NULL,
    up_to      bigint      NOT NULL,
    deliveries bigint      NOT NULL,
    lane       smallint    NOT NULL,
    consumer   text        NOT NULL,
    cluster    text        NOT NULL DEFAULT outbox.cluster(),
    -- Stretches form a chain from -1: none can be verified twice.
    CONSTRAINT watermark_pkey PRIMARY KEY (consumer, lane, above, created_at, cluster),
    CONSTRAINT lane_exists CHECK (lane BETWEEN 0 AND 15),
    CONSTRAINT above_its_start CHECK (above >= -1 AND up_to > above),
    CONSTRAINT deliveries_not_negative CHECK (deliveries >= 0)
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE inbox.watermark IS
    'stretches of a consumer''s lane in one partition of inbox.delivery that were verified: each delivery has a mark or an entry in inbox.redelivery';
COMMENT ON COLUMN inbox.watermark.created_at IS 'where the partition of inbox.delivery begins';
COMMENT ON COLUMN inbox.watermark.above IS 'the stretch begins above this seq; -1: at the first one';
COMMENT ON COLUMN inbox.watermark.up_to IS 'the last seq of the stretch';
COMMENT ON COLUMN inbox.watermark.deliveries IS 'how many deliveries of the partition, the consumer and the lane the stretch has';
COMMENT ON COLUMN inbox.watermark.cluster IS 'outbox.cluster() when it was verified: another cluster ignores it';
CREATE TABLE inbox.watermark_template (LIKE inbox.watermark INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
ALTER TABLE inbox.watermark_template SET (
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.05
);

-- For reading one delivery or a few: each row costs a search for its mark and for its entries.
CREATE VIEW inbox.delivery_status AS
SELECT d.seq, d.created_at, d.message_id, d.lane, d.consumer, d.topic, d.key, d.tenant,
       coalesce(m.acked_at, r.acked_at) AS acked_at,
       coalesce(r.attempts, 0) AS attempts,
       CASE WHEN m.acked_at IS NULL AND r.acked_at IS NULL THEN r.due_at END AS available_at,
       CASE WHEN m.acked_at IS NOT NULL OR r.acked_at IS NOT NULL THEN 'acked'
            WHEN r.cause IS NULL THEN 'ready'
            WHEN r.cause = 'blocked' THEN 'blocked'
            ELSE 'waiting' END AS state
  FROM inbox.delivery AS d
  LEFT JOIN LATERAL (
       SELECT min(a.acked_at) AS acked_at
         FROM inbox.ack AS a
        WHERE a.created_at = date_bin('15 minutes', d.created_at, '2000-01-01 00:00:00+00')
          AND a.consumer = d.consumer
          AND a.lane = d.lane
          AND a.last_seq >= d.seq
          AND a.last_seq < d.seq + 4096
          AND a.first_seq <= d.seq
          AND d.seq = ANY (a.seqs)
          AND EXISTS (SELECT FROM unnest(a.seqs, a.moments) AS marked (seq, created_at)
                       WHERE marked.seq = d.seq AND marked.created_at = d.created_at)
       ) AS m ON true
  LEFT JOIN LATERAL (
       SELECT min(e.entered_at) FILTER (WHERE e.cause = 'acked') AS acked_at,
              max(e.attempts) AS attempts,
              (array_agg(e.cause ORDER BY e.entry DESC) FILTER (WHERE e.cause <> 'acked'))[1] AS cause,
              (array_agg(e.due_at ORDER BY e.entry DESC) FILTER (WHERE e.cause <> 'acked'))[1] AS due_at
         FROM inbox.redelivery AS e
        WHERE e.seq = d.seq
          AND e.created_at = d.created_at
          -- As in every search by seq: with row-level security, a consumer can write entries for any
          -- seq, but only under its own name. IS TRUE hides the name from the planner, which could
          -- otherwise search by it, and so read all entries of the consumer.
          AND (e.consumer = d.consumer) IS TRUE
       ) AS r ON true;
COMMENT ON VIEW inbox.delivery_status IS 'each delivery of the postgres broker with what became of it';
COMMENT ON COLUMN inbox.delivery_status.available_at IS 'when it is delivered again, if the consumer gave it back';

-- The last entry of each delivery in the log that hasn't been acked since.
CREATE VIEW inbox.waiting_delivery AS
SELECT e.seq, e.created_at, d.message_id, e.lane, e.consumer, d.topic, e.key, d.tenant, e.attempts,
       e.due_at AS available_at, CASE WHEN e.due_at IS NULL THEN 'blocked' ELSE 'waiting' END AS state
  FROM inbox.redelivery AS e
 CROSS JOIN LATERAL (
       SELECT q.message_id, q.topic, q.tenant
         FROM inbox.delivery AS q
        WHERE q.seq = e.seq AND q.created_at = e.created_at AND (q.consumer = e.consumer) IS TRUE
       OFFSET 0
       ) AS d
 WHERE e.cause <> 'acked'
   AND (SELECT bool_or(later.cause = 'acked' OR later.entry > e.entry)
          FROM inbox.redelivery AS later
         WHERE later.seq = e.seq AND later.created_at = e.created_at
           AND (later.consumer = e.consumer) IS TRUE) IS NOT TRUE
   -- Nor does it have a mark, of an ack that was under way when the entry was written.
   AND (SELECT true
          FROM inbox.ack AS a
         WHERE a.created_at = date_bin('15 minutes', e.created_at, '2000-01-01 00:00:00+00')
           AND a.consumer = e.consumer AND a.lane = e.lane
           AND a.last_seq >= e.seq AND a.last_seq < e.seq + 4096 AND a.first_seq <= e.seq
           AND e.seq = ANY (a.seqs) AND e.created_at = ANY (a.moments)
         LIMIT 1) IS NULL;
COMMENT ON VIEW inbox.waiting_delivery IS 'deliveries that a consumer gave back, and those behind them in their key';

-- ROWS: few of them have deliveries above their watermark.
CREATE FUNCTION inbox.lane_progress()
RETURNS TABLE (starts_at timestamptz, ends_at timestamptz, consumer text, lane smallint, verified_up_to bigint, marked_up_to bigint)
LANGUAGE plpgsql STABLE ROWS 50
SET search_path = pg_catalog, pg_temp
SET jit = off  -- many partitions make the estimated cost high enough for it
AS $body$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH RECURSIVE named (consumer) AS (
        -- From consumer to consumer, one descent each; also of those that are subscribed no longer.
        (SELECT d.consumer FROM inbox.delivery AS d ORDER BY d.consumer LIMIT 1)
         UNION ALL
        SELECT (SELECT d.consumer FROM inbox.delivery AS d WHERE d.consumer > n.consumer ORDER BY d.consumer LIMIT 1)
          FROM named AS n
         WHERE n.consumer IS NOT NULL
    )
    SELECT part.starts_at, part.ends_at, n.consumer, l.lane::smallint, coalesce(verified.up_to, -1), coalesce(marked.last_seq, -1)
      FROM outbox.partitions('inbox.delivery') AS part
     CROSS JOIN named AS n
     CROSS JOIN generate_series(0, 15) AS l (lane)
      LEFT JOIN LATERAL (
          SELECT w.up_to
            FROM inbox.watermark AS w
           WHERE w.consumer = n.consumer AND w.lane = l.lane AND w.created_at = part.starts_at
             AND w.cluster = (SELECT outbox.cluster())
             -- Not one from before the sequence was set back.
             AND w.up_to <= (SELECT q.last_value FROM inbox.delivery_seq AS q)
           ORDER BY w.above DESC
           LIMIT 1
      ) AS verified ON true
      LEFT JOIN LATERAL (
          SELECT a.last_seq
            FROM inbox.ack AS a
           WHERE a.consumer = n.consumer AND a.lane = l.lane
             AND a.created_at >= part.starts_at AND a.created_at < part.ends_at
           ORDER BY a.last_seq DESC
           LIMIT 1
      ) AS marked ON true
     WHERE NOT part.is_default AND n.consumer IS NOT NULL;
END
$body$;
COMMENT ON FUNCTION inbox.lane_progress IS
    'for each partition, consumer and lane: the watermark, up to which each delivery has a mark or an entry, and the last seq in a mark; -1: none';

-- OFFSET 0 keeps this one search for each lane of a partition, however many rows the planner expects.
CREATE VIEW inbox.unsettled_delivery AS
SELECT fresh.seq, fresh.created_at, fresh.message_id, fresh.lane, fresh.consumer, fresh.topic, fresh.key, fresh.tenant,
       0 AS attempts, CAST(NULL AS timestamptz) AS available_at, 'ready' AS state
  FROM inbox.lane_progress() AS p
 CROSS JOIN LATERAL (
      SELECT d.seq, d.created_at, d.message_id, d.lane, d.consumer, d.topic, d.key, d.tenant
        FROM inbox.delivery AS d
       -- Compared as a row: otherwise the planner may read the seqs of all lanes by the primary key.
       WHERE d.consumer = p.consumer AND d.lane = p.lane AND (d.lane, d.seq) > (p.lane, p.verified_up_to)
         AND d.created_at >= p.starts_at AND d.created_at < p.ends_at
         AND (d.seq > p.marked_up_to
              OR (SELECT true
                    FROM inbox.ack AS a
                   WHERE a.created_at = date_bin('15 minutes', d.created_at, '2000-01-01 00:00:00+00')
                     AND a.consumer = d.consumer AND a.lane = d.lane
                     AND a.last_seq >= d.seq AND a.last_seq < d.seq + 4096 AND a.first_seq <= d.seq
                     AND d.seq = ANY (a.seqs) AND d.created_at = ANY (a.moments)
                   LIMIT 1) IS NULL)
         AND (SELECT true FROM inbox.redelivery AS e
               WHERE e.seq = d.seq AND e.created_at = d.created_at AND (e.consumer = d.consumer) IS TRUE LIMIT 1) IS NULL
      OFFSET 0
  ) AS fresh
 UNION ALL
SELECT w.seq, w.created_at, w.message_id, w.lane, w.consumer, w.topic, w.key, w.tenant, w.attempts, w.available_at, w.state
  FROM inbox.waiting_delivery AS w;
COMMENT ON VIEW inbox.unsettled_delivery IS 'deliveries that are not acked, found without reading those that are';

-- The gate of inbox.delivery, as outbox.unsettled_messages is that of outbox.message: if
-- inbox.watermark accounts for as many rows of each consumer and lane as the partition has, only those
-- in inbox.redelivery can be open, and there are few of them. Where the numbers differ, the
-- rows are compared with the marks, stretch by stretch.
CREATE FUNCTION inbox.unsettled_deliveries(partition regclass, starts_at timestamptz, ends_at timestamptz, at_most integer DEFAULT 1000)
RETURNS TABLE (seq bigint, created_at timestamptz, message_id uuid, lane smallint, consumer text, topic text, key text, tenant text, cause text)
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
    v_seqs bigint[];
    v_moments timestamptz[];
    v_rows bigint;
    v_consumers text[];
    v_lanes smallint[];
    v_differ bigint;
    v_aboves bigint[];
    v_up_tos bigint[];
    v_more_seqs bigint[];
    v_more_moments timestamptz[];
BEGIN
    EXECUTE format($query$
        SELECT array_agg(w.seq), array_agg(w.created_at)
          FROM (SELECT e.seq, e.created_at
                  FROM (SELECT DISTINCT r.seq, r.created_at, r.consumer
                          FROM inbox.redelivery r
                         WHERE r.created_at >= $1 AND r.created_at < $2 AND r.cause <> 'acked'
                           AND NOT EXISTS (
                               SELECT FROM inbox.redelivery s
                                WHERE s.seq = r.seq AND s.created_at = r.created_at AND s.consumer = r.consumer AND s.cause = 'acked'
                                  AND s.created_at >= $1 AND s.created_at < $2)
                           AND NOT EXISTS (
                               SELECT FROM inbox.ack a
                                WHERE a.created_at = date_bin('15 minutes', r.created_at, '2000-01-01 00:00:00+00')
                                  AND a.consumer = r.consumer AND a.lane = r.lane
                                  AND a.last_seq >= r.seq AND a.last_seq < r.seq + 4096 AND a.first_seq <= r.seq
                                  AND r.seq = ANY (a.seqs) AND r.created_at = ANY (a.moments))
                        OFFSET 0) AS e
                 -- Entries for no delivery of the consumer could take up all of at_most.
                 WHERE (SELECT true FROM %s AS d
                         WHERE d.seq = e.seq AND d.created_at = e.created_at AND (d.consumer = e.consumer) IS TRUE)
                 LIMIT $3) AS w $query$, partition)
       INTO v_seqs, v_moments USING starts_at, ends_at, at_most;
    -- Stretches that overlap, which nobody writes, would count rows twice.
    EXECUTE format($query$
        WITH RECURSIVE named (consumer) AS (
            -- From consumer to consumer, one descent each.
            (SELECT d.consumer FROM %1$s AS d ORDER BY d.consumer LIMIT 1)
             UNION ALL
            SELECT (SELECT d.consumer FROM %1$s AS d WHERE d.consumer > n.consumer ORDER BY d.consumer LIMIT 1)
              FROM named AS n
             WHERE n.consumer IS NOT NULL
        )
        SELECT sum(found.deliveries),
               array_agg(n.consumer) FILTER (WHERE found.deliveries <> coalesce(verified.deliveries, 0)),
               array_agg(l.lane) FILTER (WHERE found.deliveries <> coalesce(verified.deliveries, 0))
          FROM named AS n
         CROSS JOIN generate_series(0, 15) AS l (lane)
          LEFT JOIN (
               SELECT w.consumer, w.lane, sum(w.deliveries) AS deliveries
                 FROM (SELECT q.consumer, q.lane, q.deliveries, q.above,
                              max(q.up_to) OVER (PARTITION BY q.consumer, q.lane ORDER BY q.above
                                                 ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
                         FROM inbox.watermark q
                        WHERE q.created_at = $1 AND q.cluster = $2) AS w
                WHERE w.above >= coalesce(w.reached, -1)
                GROUP BY w.consumer, w.lane
               ) AS verified ON verified.consumer = n.consumer AND verified.lane = l.lane
         CROSS JOIN LATERAL (SELECT count(*) FROM %1$s AS d WHERE d.consumer = n.consumer AND d.lane = l.lane) AS found (deliveries) $query$, partition)
       INTO v_rows, v_consumers, v_lanes USING starts_at, v_cluster;
    IF v_lanes IS NOT NULL AND coalesce(cardinality(v_seqs), 0) < at_most THEN
        EXECUTE format($query$
            WITH kept AS MATERIALIZED (
                SELECT w.consumer, w.lane, w.above, w.up_to, w.deliveries
                  FROM (SELECT q.*, max(q.up_to) OVER (PARTITION BY q.consumer, q.lane ORDER BY q.above
                                                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
                          FROM inbox.watermark q
                          JOIN unnest($3, $4) AS differs (consumer, lane) ON differs.consumer = q.consumer AND differs.lane = q.lane
                         WHERE q.created_at = $1 AND q.cluster = $2) AS w
                 WHERE w.above >= coalesce(w.reached, -1)
            ), part AS (
                SELECT k.* FROM kept AS k
                 UNION ALL
                -- Between the stretches, below the first, and above the last: nothing there was verified.
                SELECT g.consumer, g.lane, g.above, g.up_to, 0
                  FROM (SELECT e.consumer, e.lane, e.above AS up_to,
                               lag(e.up_to, 1, -9223372036854775808) OVER (PARTITION BY e.consumer, e.lane ORDER BY e.above) AS above
                          FROM (SELECT k.consumer, k.lane, k.above, k.up_to FROM kept AS k
                                 UNION ALL
                                SELECT l.consumer, l.lane, 9223372036854775807, 9223372036854775807
                                  FROM unnest($3, $4) AS l (consumer, lane)) AS e) AS g
                 WHERE g.above < g.up_to
            )
            SELECT sum(found.deliveries), array_agg(part.consumer), array_agg(part.lane), array_agg(part.above), array_agg(part.up_to)
              FROM part
             CROSS JOIN LATERAL (SELECT count(*) FROM %s AS d
                                  WHERE d.consumer = part.consumer AND d.lane = part.lane
                                    AND d.seq > part.above AND d.seq <= part.up_to) AS found (deliveries)
             WHERE found.deliveries <> part.deliveries $query$, partition)
           INTO v_differ, v_consumers, v_lanes, v_aboves, v_up_tos USING starts_at, v_cluster, v_consumers, v_lanes;
    END IF;
    IF v_differ > v_rows / 4 THEN
        EXECUTE format($query$
            SELECT array_agg(u.seq), array_agg(u.created_at) FROM (
                SELECT d.seq, d.created_at
                  FROM %s AS d
                 WHERE NOT EXISTS (
                       SELECT FROM (SELECT unnest(a.seqs) AS seq, unnest(a.moments) AS created_at, a.consumer
                                      FROM inbox.ack a WHERE a.created_at >= $1 AND a.created_at < $2) AS k
                        WHERE k.seq = d.seq AND k.created_at = d.created_at AND k.consumer = d.consumer)
                   AND NOT EXISTS (
                       SELECT FROM inbox.redelivery s
                        WHERE s.seq = d.seq AND s.created_at = d.created_at AND s.consumer = d.consumer AND s.cause = 'acked'
                          AND s.created_at >= $3 AND s.created_at < $2)
                 LIMIT $4
            ) AS u $query$, partition)
           INTO STRICT v_more_seqs, v_more_moments USING v_first, ends_at, starts_at, at_most;
    ELSIF v_differ > 0 THEN
        EXECUTE format($query$
            SELECT array_agg(u.seq), array_agg(u.created_at) FROM (
                SELECT d.seq, d.created_at
                  FROM unnest($5, $6, $7, $8) AS part (consumer, lane, above, up_to)
                 CROSS JOIN LATERAL (
                       SELECT q.seq, q.created_at, q.consumer FROM %s AS q
                        WHERE q.consumer = part.consumer AND q.lane = part.lane AND q.seq > part.above AND q.seq <= part.up_to
                       OFFSET 0) AS d
                 WHERE NOT EXISTS (
                       SELECT FROM (SELECT unnest(s.seqs) AS seq, unnest(s.moments) AS created_at, s.consumer
                                      FROM unnest($5, $6, $7, $8) AS part (consumer, lane, above, up_to)
                                     CROSS JOIN LATERAL (
                                           SELECT q.seqs, q.moments, q.consumer FROM inbox.ack AS q
                                            WHERE q.created_at >= $1 AND q.created_at < $2
                                              AND q.consumer = part.consumer AND q.lane = part.lane
                                              AND q.last_seq > part.above
                                              AND q.last_seq <= least(part.up_to, 9223372036854771712) + 4095
                                           OFFSET 0) AS s) AS k
                        WHERE k.seq = d.seq AND k.created_at = d.created_at AND k.consumer = d.consumer)
                   AND NOT EXISTS (
                       SELECT FROM inbox.redelivery s
                        WHERE s.seq = d.seq AND s.created_at = d.created_at AND s.consumer = d.consumer AND s.cause = 'acked'
                          AND s.created_at >= $3 AND s.created_at < $2)
                 LIMIT $4
            ) AS u $query$, partition)
           INTO STRICT v_more_seqs, v_more_moments
          USING v_first, ends_at, starts_at, at_most, v_consumers, v_lanes, v_aboves, v_up_tos;
    END IF;
    RETURN QUERY EXECUTE format($query$
        SELECT d.seq, d.created_at, d.message_id, d.lane, d.consumer, d.topic, d.key, d.tenant,
               coalesce(e.cause, CASE WHEN d.seq <= (SELECT max(w.up_to) FROM inbox.watermark w
                                                      WHERE w.consumer = d.consumer AND w.lane = d.lane AND w.created_at = $4 AND w.cluster = $5)
                                      THEN 'inserted late' ELSE 'unclaimed' END)
          FROM %s AS d
          LEFT JOIN LATERAL (
               SELECT r.cause FROM inbox.redelivery r
                WHERE r.seq = d.seq AND r.created_at = d.created_at AND (r.consumer = d.consumer) IS TRUE
                ORDER BY r.entry DESC LIMIT 1) AS e ON true
         WHERE d.seq = ANY ($1) AND (d.seq, d.created_at) IN (SELECT p.seq, p.created_at FROM unnest($1, $2) AS p (seq, created_at))
         ORDER BY d.created_at LIMIT $3 $query$, partition)
     USING v_seqs || v_more_seqs, v_moments || v_more_moments, at_most, starts_at, v_cluster;
END
$body$;
COMMENT ON FUNCTION inbox.unsettled_deliveries IS
    'the deliveries of a partition that are not acked, up to at_most; cause is that of the last entry in the log, or unclaimed, or inserted late (below what was verified)';

CREATE TRIGGER delivery_doorbell AFTER INSERT ON inbox.delivery
    FOR EACH STATEMENT
    WHEN (NOT pg_try_advisory_xact_lock_shared(1885957228, 101)
          AND current_setting('pillarbox.two_phase', true) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION outbox.ring_doorbell('inbox_delivery');

CREATE TABLE inbox.dead_letter (
    LIKE outbox.dead_letter INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING COMMENTS,
    CONSTRAINT dead_letter_pkey PRIMARY KEY (id, created_at)
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE inbox.dead_letter IS 'deliveries that were given up, with the reason; PENDING until retried or discarded';
CREATE INDEX dead_letter_status_idx ON inbox.dead_letter (status, created_at);
CREATE INDEX dead_letter_topic_idx ON inbox.dead_letter (topic, created_at);
CREATE INDEX dead_letter_reason_idx ON inbox.dead_letter (left(error_reason, 80), created_at);
CREATE INDEX dead_letter_retry_idx ON inbox.dead_letter (retry_after) WHERE status = 'PENDING';
CREATE INDEX dead_letter_message_idx ON inbox.dead_letter (message_id);
CREATE INDEX dead_letter_life_idx ON inbox.dead_letter
    ((CASE WHEN message_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN message_id::uuid END));
CREATE TABLE inbox.dead_letter_template (LIKE inbox.dead_letter INCLUDING DEFAULTS INCLUDING CONSTRAINTS);

CREATE VIEW inbox.readable_dead_letter AS
SELECT d.id, d.created_at, d.updated_at, d.status, d.retry_count, d.retry_after, d.origin,
       d.message_id, d.topic, d.key, d.tenant, d.attempts, d.schema_version, d.content_type,
       outbox.readable_headers(d.headers) AS headers,
       outbox.json_of(d.content_type, d.payload) AS payload_json, d.payload,
       d.error_reason, d.error_stacktrace, d.discard_reason, d.discarded_by
  FROM inbox.dead_letter AS d;
COMMENT ON VIEW inbox.readable_dead_letter IS
    'dead letters, with JSON payloads as JSON; the monitor, which may not read payloads, has no access';

CREATE VIEW inbox.dead_letter_status AS
SELECT d.id, d.created_at, d.updated_at, d.status, d.retry_count, d.retry_after, d.origin,
       d.message_id, d.topic, d.key, d.tenant, d.attempts, d.schema_version, d.content_type,
       d.error_reason, d.discard_reason, d.discarded_by
  FROM inbox.dead_letter AS d;
COMMENT ON VIEW inbox.dead_letter_status IS 'dead letters without payload, headers and stack trace';

RESET ROLE;
