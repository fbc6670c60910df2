-- Makes of a new database one of an earlier checkout, which had the copy of the messages for consumers.

SET ROLE pillarbox_owner;

CREATE SEQUENCE inbox.message_seq AS bigint CACHE 1;
CREATE SEQUENCE inbox.deferral_entry_seq AS bigint CACHE 1;

CREATE TABLE inbox.base (
    cluster text        NOT NULL DEFAULT split_part(outbox.cluster(), '/', 1),
    seq     bigint      NOT NULL,
    at      timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT base_pkey PRIMARY KEY (cluster)
);

CREATE TABLE inbox.position (
    created_at    timestamptz NOT NULL,
    ends_at       timestamptz NOT NULL,
    settled_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    number        bigint      NOT NULL,
    up_to         bigint      NOT NULL,
    late_up_to    bigint,
    messages      integer     NOT NULL,
    deferred      integer     NOT NULL DEFAULT 0,
    lane          smallint    NOT NULL,
    reader        text        NOT NULL,
    snapshot      pg_snapshot NOT NULL,
    late_snapshot pg_snapshot,
    next_xid      xid8        NOT NULL DEFAULT pg_current_xact_id(),
    CONSTRAINT position_pkey PRIMARY KEY (reader, lane, number, created_at),
    CONSTRAINT lane_exists CHECK (lane BETWEEN 0 AND 47),
    CONSTRAINT numbers_in_range CHECK (number > 0 AND number <= extract(epoch FROM settled_at) * 1000000
                                       AND up_to >= -1 AND up_to <= 4611686018427387904 AND deferred BETWEEN 0 AND messages),
    CONSTRAINT ids_in_range CHECK (next_xid < '4611686018427387904'::xid8 AND pg_snapshot_xmax(snapshot) < '4611686018427387904'::xid8
                                   AND pg_snapshot_xmax(late_snapshot) < '4611686018427387904'::xid8),
    CONSTRAINT snapshots_size CHECK (pg_column_size(snapshot) <= 1048576 AND pg_column_size(late_snapshot) <= 1048576),
    CONSTRAINT late_part CHECK ((late_up_to IS NULL) = (late_snapshot IS NULL)
                                AND (late_up_to IS NULL OR late_up_to < up_to))
) PARTITION BY RANGE (created_at);
CREATE INDEX position_seq_idx ON inbox.position (reader, lane, up_to, number);

CREATE TABLE inbox.subscription (
    consumer   text        NOT NULL,
    topic      text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    since      pg_snapshot NOT NULL DEFAULT pg_current_snapshot(),
    since_seq  bigint      NOT NULL DEFAULT coalesce(pg_sequence_last_value('inbox.message_seq'::regclass), -1),
    CONSTRAINT subscription_pkey PRIMARY KEY (consumer, topic),
    CONSTRAINT names_not_empty CHECK (consumer <> '' AND topic <> ''),
    CONSTRAINT since_in_range CHECK (since_seq >= -1 AND since_seq <= 4611686018427387904 AND pg_column_size(since) <= 1048576
                                     AND pg_snapshot_xmax(since) < '4611686018427387904'::xid8),
    CONSTRAINT star_only_at_the_end CHECK (position('*' IN topic) IN (0, length(topic)))
);

CREATE TABLE inbox.message (
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
    CONSTRAINT texts_size CHECK (greatest(octet_length(topic), octet_length(key)) <= 2048
                                 AND greatest(octet_length(tenant), octet_length(content_type)) <= 1024),
    CONSTRAINT headers_size CHECK (pg_column_size(headers) <= 1024 OR pg_column_size(headers || '{}'::jsonb) <= 262208),
    CONSTRAINT payload_size CHECK (octet_length(payload) <= 67108864)
) PARTITION BY RANGE (created_at);

CREATE INDEX message_lane_idx ON inbox.message (lane, seq);
CREATE INDEX message_tenant_idx ON inbox.message (tenant, lane, seq) WHERE tenant IS NOT NULL;
CREATE INDEX message_xid_idx ON inbox.message
    USING brin (((xid::text)::bigint)) WITH (pages_per_range = 32, autosummarize = on);
CREATE INDEX message_id_idx ON inbox.message USING brin (message_id uuid_minmax_multi_ops)
    WITH (pages_per_range = 64, autosummarize = on);

CREATE TABLE inbox.deferral (
    created_at timestamptz NOT NULL,
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
CREATE INDEX deferral_delivery_idx ON inbox.deferral (seq, entry);
CREATE INDEX deferral_key_idx ON inbox.deferral (consumer, lane, key, seq) WHERE key IS NOT NULL AND cause <> 'acked';
CREATE INDEX deferral_due_idx ON inbox.deferral (due_at) WHERE due_at IS NOT NULL;

INSERT INTO inbox.base (seq) VALUES (-1);
CREATE FUNCTION inbox.covers(up_to bigint, snapshot pg_snapshot, late_up_to bigint, late_snapshot pg_snapshot,
                             seq bigint, xid xid8, base bigint) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN seq <= up_to
       AND (seq <= base OR pg_visible_in_snapshot(xid, snapshot)
            OR coalesce(seq <= late_up_to AND pg_visible_in_snapshot(xid, late_snapshot), false));

CREATE FUNCTION inbox.brings(s inbox.subscription, topic text, seq bigint, xid xid8, base bigint) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (topic = s.topic OR (right(s.topic, 1) = '*' AND starts_with(topic, left(s.topic, -1))))
       AND NOT (seq <= s.since_seq AND (seq <= base OR pg_visible_in_snapshot(xid, s.since)));

CREATE FUNCTION inbox.positions_of(starts_at timestamptz)
RETURNS TABLE (consumer text, lane smallint, up_to bigint, snapshot pg_snapshot, late_up_to bigint, late_snapshot pg_snapshot,
               next_xid xid8, settled_at timestamptz)
LANGUAGE sql STABLE ROWS 50 SET search_path = pg_catalog, pg_temp
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

CREATE FUNCTION inbox.unsettled_messages(partition regclass, starts_at timestamptz, ends_at timestamptz, at_most integer DEFAULT 1000)
RETURNS TABLE (seq bigint, created_at timestamptz, message_id uuid, lane smallint, consumer text, topic text, key text, tenant text, cause text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
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

CREATE TRIGGER message_doorbell AFTER INSERT ON inbox.message
    FOR EACH STATEMENT
    WHEN (NOT pg_try_advisory_xact_lock_shared(1885957228, 101)
          AND current_setting('pillarbox.two_phase', true) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION outbox.ring_doorbell('inbox_message');
CREATE INDEX job_topic_idx ON inbox.job (consumer, topic) WHERE topic IS NOT NULL;
-- The rest is only dropped: these have the names and the dependencies of what was there.
CREATE FUNCTION inbox.last_positions() RETURNS SETOF inbox.position LANGUAGE sql STABLE AS 'SELECT * FROM inbox.position';
CREATE FUNCTION inbox.late_deliveries(at_most integer DEFAULT NULL) RETURNS SETOF inbox.message LANGUAGE sql STABLE AS 'SELECT * FROM inbox.message';
CREATE VIEW inbox.covered_delivery AS
SELECT m.*, s.consumer FROM inbox.message AS m JOIN inbox.subscription AS s ON inbox.brings(s, m.topic, m.seq, m.xid, (SELECT max(b.seq) FROM inbox.base AS b));
CREATE VIEW inbox.delivery_status AS SELECT * FROM inbox.covered_delivery;
CREATE VIEW inbox.waiting_delivery AS SELECT * FROM inbox.deferral;
CREATE VIEW inbox.unsettled_delivery AS SELECT d.* FROM inbox.delivery_status AS d, inbox.late_deliveries(), inbox.last_positions();
DROP VIEW inbox.message_life;
CREATE VIEW inbox.job_status AS SELECT j.*, true AS is_known FROM inbox.job AS j LEFT JOIN inbox.unsettled_delivery AS d USING (message_id, consumer);
CREATE VIEW inbox.message_life AS SELECT d.message_id, d.created_at AS delivery_at FROM inbox.covered_delivery AS d;

INSERT INTO outbox.partition_policy (parent_table, control, template, retention, gate) VALUES
    ('inbox.message', 'created_at', 'inbox.message_template', '7 days', 'inbox.unsettled_messages');
INSERT INTO outbox.partition_policy (parent_table, control, template, retention, follows) VALUES
    ('inbox.deferral', 'created_at', 'inbox.deferral_template', '7 days', 'inbox.message'),
    ('inbox.position', 'created_at', 'inbox.position_template', '7 days', 'inbox.message');
CREATE TABLE inbox.message_template (LIKE inbox.message INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
CREATE TABLE inbox.deferral_template (LIKE inbox.deferral INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
CREATE TABLE inbox.position_template (LIKE inbox.position INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
SELECT outbox.make_partitions('inbox.message');

GRANT SELECT, INSERT, DELETE ON inbox.subscription TO pillarbox_consumer;
GRANT SELECT ON inbox.message, inbox.job_status, inbox.unsettled_delivery TO pillarbox_consumer;
GRANT INSERT (message_id, lane, schema_version, topic, key, tenant, content_type, headers, payload) ON inbox.message TO pillarbox_relay;
GRANT SELECT ON inbox.message_life TO pillarbox_monitor;

DROP FUNCTION outbox.overlap;
CREATE OR REPLACE FUNCTION outbox.subscribe(reader text, topics text[], broker text, discard boolean DEFAULT false, from_oldest boolean DEFAULT false,
                                            role name DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql AS $body$ BEGIN RAISE EXCEPTION 'an earlier checkout adds no topics of consumers'; END $body$;

DO $differences$
BEGIN
    EXECUTE replace(pg_get_functiondef('outbox.schema_differences'::regproc), '(''outbox.deferral_entry_seq''',
                    '(''inbox.message_seq'', (SELECT max(q.seq) FROM inbox.message q)), (''outbox.deferral_entry_seq''');
END
$differences$;
DELETE FROM outbox.promise;
INSERT INTO outbox.promise SELECT * FROM outbox.schema_facts();
INSERT INTO outbox.promise (relation, fact) SELECT relation, fact FROM outbox.rights();
UPDATE outbox.alembic_version SET version_num = '0007';
