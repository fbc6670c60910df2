-- Owner part: the inbox. Receipts, the log of the postgres broker, dead letters.

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
    since      pg_snapshot NOT NULL DEFAULT pg_current_snapshot(),
    -- Evaluated after the statement has taken its snapshot.
    since_seq  bigint      NOT NULL DEFAULT coalesce(pg_sequence_last_value('inbox.message_seq'::regclass), -1),
    CONSTRAINT subscription_pkey PRIMARY KEY (consumer, topic),
    CONSTRAINT names_not_empty CHECK (consumer <> '' AND topic <> ''),
    CONSTRAINT since_in_range CHECK (since_seq >= -1 AND since_seq <= 4611686018427387904 AND pg_column_size(since) <= 1048576
                                     AND pg_snapshot_xmax(since) < '4611686018427387904'::xid8),
    CONSTRAINT star_only_at_the_end CHECK (position('*' IN topic) IN (0, length(topic)))
);
COMMENT ON TABLE inbox.subscription IS 'the topics of each consumer of the postgres broker';
COMMENT ON COLUMN inbox.subscription.topic IS 'a topic, or a prefix followed by *';
COMMENT ON COLUMN inbox.subscription.since IS
    'the messages that are visible in this snapshot were there before: the consumer doesn''t get them';
COMMENT ON COLUMN inbox.subscription.since_seq IS 'the last seq that had been drawn then';

-- As outbox.message, but with any number of rows of one message, since relays may publish it again.
CREATE TABLE inbox.message (
    -- As for outbox.message.seq: the transaction is assigned its id first.
    seq            bigint      NOT NULL DEFAULT CASE WHEN pg_current_xact_id() IS NOT NULL
                                                     THEN nextval('inbox.message_seq'::regclass) END,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    xid            xid8        NOT NULL DEFAULT pg_current_xact_id(),
    message_id     uuid        NOT NULL,
    lane           smallint    NOT NULL,
    schema_version integer     NOT NULL,
    topic          text        NOT NULL,
    key            text,
    tenant         text,
    content_type   text        NOT NULL,
    headers        jsonb       NOT NULL,
    payload        bytea       NOT NULL,
    CONSTRAINT message_pkey PRIMARY KEY (seq, created_at),
    CONSTRAINT lane_exists CHECK (lane BETWEEN 0 AND 15),
    -- As for outbox.message. Consumers dead-letter what is wrong otherwise.
    CONSTRAINT texts_size CHECK (greatest(octet_length(topic), octet_length(key)) <= 2048
                                 AND greatest(octet_length(tenant), octet_length(content_type)) <= 1024),
    CONSTRAINT headers_size CHECK (pg_column_size(headers) <= 1024 OR pg_column_size(headers || '{}'::jsonb) <= 262208),
    CONSTRAINT payload_size CHECK (octet_length(payload) <= 67108864)
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE inbox.message IS
    'the messages of the postgres broker, one row for all consumers, never updated: inbox.position and inbox.deferral say what became of it at each';
COMMENT ON COLUMN inbox.message.xid IS
    'the transaction that added it, in this cluster: with a snapshot it shows whether a consumer could see the row';

-- The claim: the rows of a lane, in order.
CREATE INDEX message_lane_idx ON inbox.message (lane, seq);
-- For claims that take turns between tenants, so that one tenant's flood doesn't delay the others.
CREATE INDEX message_tenant_idx ON inbox.message (tenant, lane, seq) WHERE tenant IS NOT NULL;
-- As for outbox.message.
CREATE INDEX message_xid_idx ON inbox.message
    USING brin (((xid::text)::bigint)) WITH (pages_per_range = 32, autosummarize = on);
-- For lives. UUIDv7s ascend almost in the order of the inserts, so a message is in one of a few ranges
-- of pages. The index costs an insert next to nothing, and autovacuum summarizes it range by range.
CREATE INDEX message_id_idx ON inbox.message USING brin (message_id uuid_minmax_multi_ops)
    WITH (pages_per_range = 64, autosummarize = on);

-- What happened to each delivery that wasn't acked when it was first claimed. It waits until it has
-- an entry 'acked', whatever entries arrive later. A delivery that no position covers yet can have
-- entries, too: claims skip it.
CREATE TABLE inbox.deferral (
    created_at timestamptz NOT NULL,
    -- As for outbox.message.seq: the transaction is assigned its id first.
    entry      bigint      NOT NULL DEFAULT CASE WHEN pg_current_xact_id() IS NOT NULL
                                                 THEN nextval('inbox.deferral_entry_seq'::regclass) END,
    entered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    due_at     timestamptz,
    seq        bigint      NOT NULL,
    attempts   integer     NOT NULL DEFAULT 0,
    lane       smallint    NOT NULL,
    cause      text        NOT NULL,
    consumer   text        NOT NULL,
    key        text,
    CONSTRAINT deferral_pkey PRIMARY KEY (consumer, lane, entry, created_at),
    CONSTRAINT within_a_year CHECK (due_at - entered_at <= interval '366 days'),
    CONSTRAINT seq_in_range CHECK (seq >= -1 AND seq <= 4611686018427387904),
    CONSTRAINT key_size CHECK (octet_length(key) <= 2048),
    CONSTRAINT lane_exists CHECK (lane BETWEEN 0 AND 15),
    CONSTRAINT attempts_not_negative CHECK (attempts >= 0),
    CONSTRAINT cause_known CHECK (cause IN ('refused', 'blocked', 'open', 'found', 'acked')),
    CONSTRAINT due_unless_blocked_or_acked CHECK ((due_at IS NULL) = (cause IN ('blocked', 'acked'))),
    CONSTRAINT blocked_by_its_key CHECK (cause <> 'blocked' OR key IS NOT NULL)
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE inbox.deferral IS
    'a log, never updated: the deliveries that a consumer gave back or that wait behind another one of their key, and until when';
COMMENT ON COLUMN inbox.deferral.created_at IS 'when the message was inserted';
COMMENT ON COLUMN inbox.deferral.cause IS
    'refused: the consumer gave it back; blocked: a delivery of its key waits; open: it was in hand while later ones were acked; found: it had the number of another one, or was found below a position by pillarbox migrate; acked: it waits no longer';
COMMENT ON COLUMN inbox.deferral.attempts IS 'how often the consumer has failed to handle it';
COMMENT ON COLUMN inbox.deferral.due_at IS 'when to deliver it again; null: when its key is free, or never (acked)';
CREATE INDEX deferral_delivery_idx ON inbox.deferral (seq, entry);
CREATE INDEX deferral_key_idx ON inbox.deferral (consumer, lane, key, seq) WHERE key IS NOT NULL AND cause <> 'acked';
CREATE INDEX deferral_due_idx ON inbox.deferral (due_at) WHERE due_at IS NOT NULL;

INSERT INTO inbox.base (seq) VALUES (-1);
COMMENT ON TABLE inbox.process IS 'outbox.process for consumers, on every broker: the row of a consumer is in the database of its handlers';
COMMENT ON TABLE inbox.position IS
    'how far a consumer has handled a lane and a day of inbox.message, never updated: the row with the highest number counts; a delivery that it covers is acked, unless inbox.deferral has an entry';
COMMENT ON COLUMN inbox.position.reader IS 'the consumer';
COMMENT ON COLUMN inbox.position.messages IS 'how many deliveries of the lane and the day ended with this settlement';
COMMENT ON COLUMN inbox.position.deferred IS 'how many of them have an entry in inbox.deferral that says that they were in hand';
COMMENT ON TABLE inbox.dead_letter IS 'deliveries that could not be handled, with the reason; PENDING until retried or discarded';

-- These two without settings, so that the planner inlines them.
CREATE FUNCTION inbox.covers(up_to bigint, snapshot pg_snapshot, late_up_to bigint, late_snapshot pg_snapshot,
                             seq bigint, xid xid8, base bigint) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN seq <= up_to
       AND (seq <= base OR pg_visible_in_snapshot(xid, snapshot)
            OR coalesce(seq <= late_up_to AND pg_visible_in_snapshot(xid, late_snapshot), false));
COMMENT ON FUNCTION inbox.covers IS
    'whether a position covers a message of its lane and day; base: the highest seq of inbox.base';

CREATE FUNCTION inbox.brings(s inbox.subscription, topic text, seq bigint, xid xid8, base bigint) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (topic = s.topic OR (right(s.topic, 1) = '*' AND starts_with(topic, left(s.topic, -1))))
       AND NOT (seq <= s.since_seq AND (seq <= base OR pg_visible_in_snapshot(xid, s.since)));
COMMENT ON FUNCTION inbox.brings IS 'whether a consumer gets a message because of this subscription';

CREATE FUNCTION inbox.positions_of(starts_at timestamptz)
RETURNS TABLE (consumer text, lane smallint, up_to bigint, snapshot pg_snapshot, late_up_to bigint, late_snapshot pg_snapshot,
               next_xid xid8, settled_at timestamptz)
LANGUAGE sql STABLE ROWS 50 {pinned}
BEGIN ATOMIC
    SELECT c.consumer, l.lane::smallint, coalesce(p.up_to, c.since_seq), coalesce(p.snapshot, format('%1$s:%1$s:', c.xmin)::pg_snapshot),
           p.late_up_to, p.late_snapshot, p.next_xid, p.settled_at
      FROM (SELECT s.consumer, min(s.since_seq) AS since_seq, min(pg_snapshot_xmin(s.since)::text::bigint) AS xmin
              FROM inbox.subscription AS s
             GROUP BY s.consumer) AS c
     CROSS JOIN generate_series(0, 15) AS l (lane)
      LEFT JOIN LATERAL (
           SELECT q.up_to, q.snapshot, q.late_up_to, q.late_snapshot, q.next_xid, q.settled_at
             FROM inbox.position AS q
            WHERE q.reader = c.consumer AND q.lane = l.lane AND q.created_at = positions_of.starts_at
            ORDER BY q.number DESC
            LIMIT 1
           ) AS p ON true;
END;
COMMENT ON FUNCTION inbox.positions_of IS
    'the position of each subscribed consumer and lane in the day that begins then: the one in force, or else that of its oldest subscription';

CREATE FUNCTION inbox.last_positions()
RETURNS TABLE (starts_at timestamptz, ends_at timestamptz, consumer text, lane smallint, up_to bigint, snapshot pg_snapshot,
               late_up_to bigint, late_snapshot pg_snapshot, next_xid xid8, settled_at timestamptz)
LANGUAGE sql STABLE ROWS 100 {pinned}
SET jit = off  -- many partitions make the estimated cost high enough for it
BEGIN ATOMIC
    SELECT d.starts_at, d.ends_at, p.consumer, p.lane,
           -- Not one from before the sequence was set back.
           CASE WHEN p.up_to <= (SELECT q.last_value FROM inbox.message_seq AS q) THEN p.up_to ELSE -9223372036854775808 END,
           p.snapshot, p.late_up_to, p.late_snapshot, p.next_xid, p.settled_at
      FROM outbox.partitions('inbox.message') AS d
     CROSS JOIN LATERAL inbox.positions_of(d.starts_at) AS p
     WHERE NOT d.is_default;
END;
COMMENT ON FUNCTION inbox.last_positions IS 'inbox.positions_of for each day, and a seq: only a late message at or below it is not covered';

-- Messages that committed after a consumer's position had passed them: see outbox.late_messages.
CREATE FUNCTION inbox.late_deliveries(at_most integer DEFAULT NULL)
RETURNS TABLE (consumer text, seq bigint, created_at timestamptz)
LANGUAGE plpgsql STABLE ROWS 10 {pinned}
SET enable_seqscan = off  -- stale statistics can make a sequential scan look cheap
SET jit = off
AS $body$
DECLARE
    v_base bigint := (SELECT max(b.seq) FROM inbox.base AS b);
    v_hidden bigint[] := ARRAY(
        SELECT DISTINCT x::text::bigint
          FROM (SELECT p.*, max(p.settled_at) OVER (PARTITION BY p.consumer) - interval '10 minutes' AS recent
                  FROM inbox.last_positions() AS p
                 WHERE p.next_xid IS NOT NULL) AS p
         CROSS JOIN LATERAL (
               SELECT pg_snapshot_xip(p.snapshot)
                UNION ALL
               SELECT n::text::xid8
                 FROM generate_series(pg_snapshot_xmax(p.snapshot)::text::bigint,
                                      -- A transaction with many savepoints has many ids, of which the first counts.
                                      least(p.next_xid::text::bigint, pg_snapshot_xmax(p.snapshot)::text::bigint + 10000) - 1) AS n
               ) AS hidden (x)
         WHERE p.up_to > v_base AND (p.settled_at > p.recent OR p.late_up_to IS NOT NULL)
           AND x <> ALL (ARRAY(SELECT pg_snapshot_xip(pg_current_snapshot()))));
BEGIN
    IF cardinality(v_hidden) > 0 THEN
        RETURN QUERY
        SELECT p.consumer, m.seq, m.created_at
          FROM inbox.message AS m
          JOIN inbox.last_positions() AS p ON p.lane = m.lane AND m.created_at >= p.starts_at AND m.created_at < p.ends_at
         WHERE (m.xid::text)::bigint = ANY (v_hidden)
           AND m.seq <= p.up_to AND NOT inbox.covers(p.up_to, p.snapshot, p.late_up_to, p.late_snapshot, m.seq, m.xid, v_base)
         LIMIT at_most;
    END IF;
END
$body$;
COMMENT ON FUNCTION inbox.late_deliveries IS
    'messages at or below the position of a consumer that committed after its claim, and are not claimed yet';

-- For reading one delivery or a few: each row costs a search for its position and for its entries.
CREATE VIEW inbox.covered_delivery AS
SELECT m.seq, m.created_at, m.message_id, m.lane, c.consumer, m.topic, m.key, m.tenant, p.covered_at
  FROM inbox.message AS m
 CROSS JOIN LATERAL (
       SELECT DISTINCT s.consumer
         FROM inbox.subscription AS s
        WHERE inbox.brings(s, m.topic, m.seq, m.xid, (SELECT max(b.seq) FROM inbox.base AS b))
       ) AS c
  LEFT JOIN LATERAL (
      WITH days AS MATERIALIZED (
          SELECT array_agg(d.starts_at) FROM outbox.partitions('inbox.message') AS d WHERE d.starts_at IS NOT NULL
      )
      SELECT q.settled_at AS covered_at
        FROM inbox.position AS q
       WHERE q.reader = c.consumer AND q.lane = m.lane AND q.up_to >= m.seq AND q.ends_at > m.created_at
         AND q.created_at = (TABLE days)[width_bucket(m.created_at, (TABLE days))]
         AND inbox.covers(q.up_to, q.snapshot, q.late_up_to, q.late_snapshot, m.seq, m.xid, (SELECT max(b.seq) FROM inbox.base AS b))
       ORDER BY q.up_to, q.number
       LIMIT 1
  ) AS p ON true;
COMMENT ON VIEW inbox.covered_delivery IS
    'each message of the postgres broker with each consumer that gets it, and the moment at which a position of the consumer first covered it';

CREATE VIEW inbox.delivery_status AS
SELECT d.seq, d.created_at, d.message_id, d.lane, d.consumer, d.topic, d.key, d.tenant,
       CASE WHEN r.entries = 0 THEN d.covered_at ELSE r.acked_at END AS acked_at,
       coalesce(r.attempts, 0) AS attempts,
       CASE WHEN r.acked_at IS NULL THEN r.due_at END AS available_at,
       CASE WHEN r.acked_at IS NOT NULL OR (r.entries = 0 AND d.covered_at IS NOT NULL) THEN 'acked'
            WHEN r.entries = 0 THEN 'ready'
            WHEN r.cause = 'blocked' THEN 'blocked'
            ELSE 'waiting' END AS state
  FROM inbox.covered_delivery AS d
 CROSS JOIN LATERAL (
       SELECT count(*) AS entries,
              min(e.entered_at) FILTER (WHERE e.cause = 'acked') AS acked_at,
              max(e.attempts) AS attempts,
              (array_agg(e.cause ORDER BY e.entry DESC) FILTER (WHERE e.cause <> 'acked'))[1] AS cause,
              (array_agg(e.due_at ORDER BY e.entry DESC) FILTER (WHERE e.cause <> 'acked'))[1] AS due_at
         FROM inbox.deferral AS e
        WHERE e.seq = d.seq
          AND e.created_at = d.created_at
          -- As in every search by seq: IS TRUE hides the name from the planner, which could otherwise
          -- search by it, and so read all entries of the consumer.
          AND (e.consumer = d.consumer) IS TRUE
       ) AS r;
COMMENT ON VIEW inbox.delivery_status IS 'each delivery of the postgres broker with what became of it';
COMMENT ON COLUMN inbox.delivery_status.available_at IS 'when it is delivered again, if the consumer gave it back';

-- The last entry of each delivery in the log that hasn't been acked since.
CREATE VIEW inbox.waiting_delivery AS
SELECT e.seq, e.created_at, d.message_id, e.lane, e.consumer, d.topic, e.key, d.tenant, e.attempts,
       e.due_at AS available_at, CASE WHEN e.due_at IS NULL THEN 'blocked' ELSE 'waiting' END AS state
  FROM inbox.deferral AS e
 CROSS JOIN LATERAL (
       SELECT q.message_id, q.topic, q.tenant
         FROM inbox.message AS q
        WHERE q.seq = e.seq AND q.created_at = e.created_at
          AND EXISTS (SELECT FROM inbox.subscription AS s
                       WHERE s.consumer = e.consumer
                         AND inbox.brings(s, q.topic, q.seq, q.xid, (SELECT max(b.seq) FROM inbox.base AS b)))
       OFFSET 0
       ) AS d
 WHERE e.cause <> 'acked'
   AND (SELECT bool_or(later.cause = 'acked' OR later.entry > e.entry)
          FROM inbox.deferral AS later
         WHERE later.seq = e.seq AND later.created_at = e.created_at
           AND (later.consumer = e.consumer) IS TRUE) IS NOT TRUE;
COMMENT ON VIEW inbox.waiting_delivery IS 'deliveries that a consumer gave back, and those behind them in their key';

-- OFFSET 0 keeps this one search for each lane of a partition, however many rows the planner expects.
CREATE VIEW inbox.unsettled_delivery AS
SELECT fresh.seq, fresh.created_at, fresh.message_id, fresh.lane, p.consumer, fresh.topic, fresh.key, fresh.tenant,
       0 AS attempts, CAST(NULL AS timestamptz) AS available_at, 'ready' AS state
  FROM inbox.last_positions() AS p
 CROSS JOIN LATERAL (
      SELECT m.seq, m.created_at, m.message_id, m.lane, m.topic, m.key, m.tenant
        FROM inbox.message AS m
       -- Compared as a row: otherwise the planner may read the seqs of all lanes by the primary key.
       WHERE m.lane = p.lane AND (m.lane, m.seq) > (p.lane, p.up_to)
         AND m.created_at >= p.starts_at AND m.created_at < p.ends_at
         AND inbox.covers(p.up_to, p.snapshot, p.late_up_to, p.late_snapshot, m.seq, m.xid, (SELECT max(b.seq) FROM inbox.base AS b)) IS NOT TRUE
         AND EXISTS (SELECT FROM inbox.subscription AS s
                      WHERE s.consumer = p.consumer
                        AND inbox.brings(s, m.topic, m.seq, m.xid, (SELECT max(b.seq) FROM inbox.base AS b)))
         AND (SELECT true FROM inbox.deferral AS e
               WHERE e.seq = m.seq AND e.created_at = m.created_at AND (e.consumer = p.consumer) IS TRUE LIMIT 1) IS NULL
      OFFSET 0
  ) AS fresh
 UNION ALL
SELECT d.seq, d.created_at, d.message_id, d.lane, d.consumer, d.topic, d.key, d.tenant, d.attempts, d.available_at, d.state
  FROM inbox.late_deliveries() AS late
 CROSS JOIN LATERAL (
      SELECT s.* FROM inbox.delivery_status AS s
       WHERE s.seq = late.seq AND s.created_at = late.created_at AND (s.consumer = late.consumer) IS TRUE AND s.state = 'ready'
      OFFSET 0
  ) AS d
 UNION ALL
SELECT w.seq, w.created_at, w.message_id, w.lane, w.consumer, w.topic, w.key, w.tenant, w.attempts, w.available_at, w.state
  FROM inbox.waiting_delivery AS w;
COMMENT ON VIEW inbox.unsettled_delivery IS 'deliveries that are not acked, found without reading those that are';

-- The gate of inbox.message: the deliveries to subscribed consumers that no position covers, and those
-- that wait. Below a position, only rows whose transaction wasn't over when the consumer looked can be
-- uncovered.
CREATE FUNCTION inbox.unsettled_messages(partition regclass, starts_at timestamptz, ends_at timestamptz, at_most integer DEFAULT 1000)
RETURNS TABLE (seq bigint, created_at timestamptz, message_id uuid, lane smallint, consumer text, topic text, key text, tenant text, cause text)
LANGUAGE plpgsql STABLE {pinned}
SET enable_seqscan = off  -- stale statistics can make a sequential scan look cheap
SET jit = off  -- the estimated cost may be high enough for it
AS $body$
DECLARE
    v_base bigint := (SELECT max(b.seq) FROM inbox.base AS b);
    v_found integer;
BEGIN
    RETURN QUERY EXECUTE format($query$
        SELECT m.seq, m.created_at, m.message_id, m.lane, e.consumer, m.topic, m.key, m.tenant, e.cause
          FROM (SELECT DISTINCT ON (r.seq, r.created_at, r.consumer) r.seq, r.created_at, r.consumer, r.cause
                  FROM inbox.deferral AS r
                 WHERE r.created_at >= $1 AND r.created_at < $2 AND r.cause <> 'acked'
                   AND NOT EXISTS (
                       SELECT FROM inbox.deferral AS s
                        WHERE s.seq = r.seq AND s.created_at = r.created_at AND s.consumer = r.consumer AND s.cause = 'acked'
                          AND s.created_at >= $1 AND s.created_at < $2)
                 ORDER BY r.seq, r.created_at, r.consumer, r.entry DESC) AS e
         CROSS JOIN LATERAL (SELECT * FROM %s AS q WHERE q.seq = e.seq AND q.created_at = e.created_at LIMIT 1) AS m
         WHERE EXISTS (SELECT FROM inbox.subscription AS s
                        WHERE s.consumer = e.consumer AND inbox.brings(s, m.topic, m.seq, m.xid, $4))
         LIMIT $3 $query$, partition) USING starts_at, ends_at, at_most, v_base;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    RETURN QUERY EXECUTE format($query$
        WITH p AS MATERIALIZED (SELECT * FROM inbox.positions_of($1)),
        uncovered AS (
            SELECT p.consumer, 'unclaimed' AS cause, m.*
              FROM p
             CROSS JOIN LATERAL (SELECT * FROM %1$s AS q WHERE q.lane = p.lane AND q.seq > p.up_to OFFSET 0) AS m
             UNION ALL
            SELECT p.consumer, 'inserted late', m.*
              FROM (SELECT * FROM %1$s AS q
                     WHERE (q.xid::text)::bigint >= (SELECT min(pg_snapshot_xmin(p.snapshot)::text::bigint) FROM p) OFFSET 0) AS m
              JOIN p ON p.lane = m.lane AND m.seq <= p.up_to
             WHERE NOT inbox.covers(p.up_to, p.snapshot, p.late_up_to, p.late_snapshot, m.seq, m.xid, $3)
        )
        SELECT m.seq, m.created_at, m.message_id, m.lane, m.consumer, m.topic, m.key, m.tenant, m.cause
          FROM uncovered AS m
         WHERE EXISTS (SELECT FROM inbox.subscription AS s
                        WHERE s.consumer = m.consumer AND inbox.brings(s, m.topic, m.seq, m.xid, $3))
           AND (SELECT true FROM inbox.deferral AS e
                 WHERE e.seq = m.seq AND e.created_at = m.created_at AND (e.consumer = m.consumer) IS TRUE LIMIT 1) IS NULL
         LIMIT $2 $query$, partition) USING starts_at, at_most - v_found, v_base;
END
$body$;
COMMENT ON FUNCTION inbox.unsettled_messages IS
    'the deliveries of a partition to subscribed consumers that are not acked, up to at_most; cause is that of the last entry in the log, or unclaimed, or inserted late (below the position)';

CREATE TRIGGER message_doorbell AFTER INSERT ON inbox.message
    FOR EACH STATEMENT
    WHEN (NOT pg_try_advisory_xact_lock_shared(1885957228, 101)
          AND current_setting('pillarbox.two_phase', true) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION outbox.ring_doorbell('inbox_message');
