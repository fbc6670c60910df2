-- Owner part: the outbox. Tables, the writer for SQL, the doorbell.

SET LOCAL ROLE {owner};

CREATE SEQUENCE outbox.message_seq AS bigint CACHE 1;
COMMENT ON SEQUENCE outbox.message_seq IS
    'order within a lane; no identity column, which partition tooling loses';

CREATE TABLE outbox.message (
    id               uuid        NOT NULL,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The transaction gets its id before its place in the order: so a relay that sees a later seq
    -- sees in its snapshot that this transaction is open, and doesn't pass it by.
    seq              bigint      NOT NULL DEFAULT CASE WHEN pg_current_xact_id() IS NOT NULL
                                                       THEN nextval('outbox.message_seq'::regclass) END,
    lane             smallint    NOT NULL,
    schema_version   integer     NOT NULL DEFAULT 1,
    attempts         integer     NOT NULL DEFAULT 0,
    available_at     timestamptz,
    published_at     timestamptz,
    dead_lettered_at timestamptz,
    topic            text        NOT NULL,
    key              text,
    tenant           text,
    content_type     text        NOT NULL,
    headers          jsonb       NOT NULL DEFAULT '{}'::jsonb,
    payload          bytea       NOT NULL,
    last_error       text,
    CONSTRAINT message_pkey PRIMARY KEY (id, created_at),
    CONSTRAINT lane_exists CHECK (lane BETWEEN 0 AND 47),
    CONSTRAINT attempts_not_negative CHECK (attempts >= 0),
    -- Infinity would hold its day for ever, and Python has no moment beyond these.
    CONSTRAINT available_at_finite CHECK (available_at BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'),
    CONSTRAINT settled_once CHECK (published_at IS NULL OR dead_lettered_at IS NULL)
) PARTITION BY RANGE (created_at);

COMMENT ON TABLE outbox.message IS 'one row for each message; unsettled until published_at or dead_lettered_at is set';
COMMENT ON COLUMN outbox.message.id IS 'UUIDv7 made by the writer: the idempotency key of consumers';
COMMENT ON COLUMN outbox.message.seq IS 'order within the lane';
COMMENT ON COLUMN outbox.message.lane IS 'outbox.lane_of(key, id, priority): unit of order and of lease';
COMMENT ON COLUMN outbox.message.available_at IS 'null: ready; else it waits until then (scheduled, or a retry when attempts > 0)';
COMMENT ON COLUMN outbox.message.attempts IS 'how often the broker refused it; an absent broker does not count';
COMMENT ON COLUMN outbox.message.published_at IS 'when the broker''s ack was written down';

-- The claim: ready and unsettled rows of a lane, in order.
CREATE INDEX message_ready_idx ON outbox.message (lane, seq)
    WHERE available_at IS NULL AND published_at IS NULL AND dead_lettered_at IS NULL;
-- What waits, apart: a million messages for next week must not lie in the way of a claim.
CREATE INDEX message_waiting_idx ON outbox.message (lane, available_at)
    WHERE available_at IS NOT NULL AND published_at IS NULL AND dead_lettered_at IS NULL;

-- Blocked keys: a nacked head, while it waits and until it is settled. Holds next to nothing, and no
-- other row pays for it.
CREATE INDEX message_blocked_idx ON outbox.message (lane, key)
    WHERE attempts > 0 AND published_at IS NULL AND dead_lettered_at IS NULL;

-- What a handler added, by the message that it handled: to publish it once more.
CREATE INDEX message_cause_idx ON outbox.message ((headers ->> 'causation-id')) WHERE headers ? 'causation-id';

-- Storage parameters can't be set on a partitioned table: pg_partman copies them from here.
CREATE TABLE outbox.message_template (LIKE outbox.message);
ALTER TABLE outbox.message_template SET (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.05
);
COMMENT ON TABLE outbox.message_template IS 'storage parameters for new partitions of outbox.message';

CREATE TABLE outbox.dead_letter (
    id               uuid        NOT NULL DEFAULT gen_random_uuid(),
    created_at       timestamptz NOT NULL DEFAULT now(),
    updated_at       timestamptz NOT NULL DEFAULT now(),
    status           text        NOT NULL DEFAULT 'PENDING',
    retry_count      integer     NOT NULL DEFAULT 0,
    retry_after      timestamptz          DEFAULT now(),
    origin           text        NOT NULL,
    message_id       text        NOT NULL,
    topic            text        NOT NULL,
    key              text,
    tenant           text,
    attempts         integer     NOT NULL,
    schema_version   integer     NOT NULL,
    content_type     text        NOT NULL,
    headers          jsonb       NOT NULL,
    payload          bytea       NOT NULL,
    error_reason     text        NOT NULL,
    error_stacktrace text,
    discard_reason   text,
    discarded_by     text,
    CONSTRAINT dead_letter_pkey PRIMARY KEY (id, created_at),
    CONSTRAINT status_known CHECK (status IN ('PENDING', 'SUCCEEDED', 'DISCARDED')),
    CONSTRAINT retry_after_finite CHECK (retry_after BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'),
    CONSTRAINT updated_at_finite CHECK (updated_at BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'),
    CONSTRAINT discarded_with_a_reason CHECK (status <> 'DISCARDED' OR discard_reason IS NOT NULL)
) PARTITION BY RANGE (created_at);

COMMENT ON TABLE outbox.dead_letter IS 'messages that were given up, with the reason; PENDING until someone decides';
COMMENT ON COLUMN outbox.dead_letter.origin IS 'who gave it up: publisher:<scheme> or consumer:<name>';
COMMENT ON COLUMN outbox.dead_letter.retry_count IS 'retries that failed, as attempts are those before it was given up';
COMMENT ON COLUMN outbox.dead_letter.retry_after IS 'not retried by the schedule before; null: only by hand';

CREATE INDEX dead_letter_status_idx ON outbox.dead_letter (status, created_at);
CREATE INDEX dead_letter_topic_idx ON outbox.dead_letter (topic, created_at);
CREATE INDEX dead_letter_reason_idx ON outbox.dead_letter (left(error_reason, 80), created_at);
CREATE INDEX dead_letter_retry_idx ON outbox.dead_letter (retry_after) WHERE status = 'PENDING';
-- Is it given up already?
CREATE INDEX dead_letter_message_idx ON outbox.dead_letter (message_id) WHERE status = 'PENDING';
CREATE TABLE outbox.dead_letter_template (LIKE outbox.dead_letter);

-- A cast would make one bad payload fail the query for all.
CREATE FUNCTION outbox.json_of(content_type text, payload bytea) RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $body$
BEGIN
    IF lower(content_type) ~ '^\s*application/([^;\s]+\+)?json\s*(;|$)' THEN
        RETURN convert_from(payload, 'UTF8')::jsonb;
    END IF;
    RETURN NULL;
EXCEPTION
    WHEN data_exception OR program_limit_exceeded THEN
        RETURN NULL;
END
$body$;
COMMENT ON FUNCTION outbox.json_of IS 'a payload as JSON, or null if it is none';

CREATE VIEW outbox.readable_dead_letter AS
SELECT d.id, d.created_at, d.updated_at, d.status, d.retry_count, d.retry_after, d.origin,
       d.message_id, d.topic, d.key, d.tenant, d.attempts, d.schema_version, d.content_type,
       d.headers, outbox.json_of(d.content_type, d.payload) AS payload_json, d.payload,
       d.error_reason, d.error_stacktrace, d.discard_reason, d.discarded_by
  FROM outbox.dead_letter AS d;
COMMENT ON VIEW outbox.readable_dead_letter IS
    'dead letters with their payload as JSON where it is JSON; not for the monitor, who reads no payloads';

CREATE FUNCTION outbox.lane_of(key text, id uuid, priority text DEFAULT 'default') RETURNS smallint
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
RETURN (
    CASE priority WHEN 'realtime' THEN 0 WHEN 'default' THEN 16 WHEN 'bulk' THEN 32 END
    + CASE WHEN key IS NULL THEN get_byte(uuid_send(id), 15) & 15
           ELSE get_byte(sha256(convert_to(key, 'UTF8')), 0) & 15 END
)::smallint;
COMMENT ON FUNCTION outbox.lane_of IS 'the lane of a message; the same rule as outbox.lane in Python';

CREATE FUNCTION outbox.uuid7() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
RETURN encode(
    set_byte(
        overlay(
            uuid_send(gen_random_uuid())
            PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
            FROM 1 FOR 6
        ),
        6, get_byte(uuid_send(gen_random_uuid()), 6) & 15 | 112
    ),
    'hex'
)::uuid;
COMMENT ON FUNCTION outbox.uuid7 IS 'a UUIDv7 (RFC 9562) of this moment';

CREATE FUNCTION outbox.add(
    topic          text,
    payload        bytea,
    key            text        DEFAULT NULL,
    tenant         text        DEFAULT NULL,
    headers        jsonb       DEFAULT '{}'::jsonb,
    content_type   text        DEFAULT 'application/octet-stream',
    schema_version integer     DEFAULT 1,
    priority       text        DEFAULT 'default',
    available_at   timestamptz DEFAULT NULL,
    id             uuid        DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    v_id uuid := coalesce(add.id, outbox.uuid7());
    v_problem text := CASE
        WHEN add.topic IS NULL OR add.topic = '' THEN 'topic is empty'
        WHEN length(add.topic) > 255 THEN format('topic has %s characters, the limit is 255', length(add.topic))
        WHEN add.payload IS NULL THEN 'payload is null'
        WHEN octet_length(add.payload) > 1048576 THEN format('payload has %s bytes, the limit is 1048576', octet_length(add.payload))
        WHEN add.key = '' THEN 'key is empty: leave it null for a message without order'
        WHEN length(add.key) > 512 THEN format('key has %s characters, the limit is 512', length(add.key))
        WHEN add.tenant = '' OR length(add.tenant) > 255 THEN 'tenant must have 1 to 255 characters'
        WHEN coalesce(add.content_type, '') = '' THEN 'content_type is empty'
        WHEN length(add.content_type) > 255 THEN format('content_type has %s characters, the limit is 255', length(add.content_type))
        WHEN coalesce(add.schema_version, 0) < 1 THEN format('schema_version is %s, it starts at 1', coalesce(add.schema_version::text, 'null'))
        WHEN coalesce(add.priority, '') NOT IN ('realtime', 'default', 'bulk') THEN format('priority is %L, not realtime, default or bulk', add.priority)
        WHEN add.available_at > clock_timestamp() + interval '6 days' THEN format('available_at is %s, more than 6 days ahead', add.available_at)
        WHEN add.available_at NOT BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00' THEN format('available_at is %s, no moment of the years 1 to 9999', add.available_at)
        WHEN get_byte(uuid_send(v_id), 6) >> 4 <> 7 OR get_byte(uuid_send(v_id), 8) >> 6 <> 2 THEN format('id %s is not a UUIDv7', v_id)
        -- Receipts live in daily partitions that are found by the moment in the id.
        WHEN abs(('x' || encode(substring(uuid_send(v_id) FROM 1 FOR 6), 'hex'))::bit(48)::bigint
                 - extract(epoch FROM clock_timestamp()) * 1000) >= 86400000
            THEN format('id %s was made more than a day from now: make a new one with outbox.uuid7()', v_id)
        WHEN coalesce(jsonb_typeof(add.headers), '') <> 'object' THEN 'headers is not a JSON object'
        -- Strict, or arrays would be looked into.
        WHEN jsonb_path_exists(add.headers, 'strict $.* ? (@.type() <> "string")') THEN 'headers has a value that is not a string'
        -- The same names as in outbox/limits.py.
        WHEN EXISTS (SELECT FROM jsonb_object_keys(add.headers) name WHERE name ~* '^(ce[-_]|cloudevents[:_]|nats-|pillarbox-|webhook-|content-type$)')
            THEN format('headers has the reserved name %L: ce-, ce_, cloudEvents:, cloudEvents_, nats-, pillarbox-, webhook- and content-type belong to brokers and pillarbox',
                        (SELECT name FROM jsonb_object_keys(add.headers) name WHERE name ~* '^(ce[-_]|cloudevents[:_]|nats-|pillarbox-|webhook-|content-type$)' LIMIT 1))
        WHEN (SELECT sum(octet_length(h.key) + octet_length(h.value)) FROM jsonb_each_text(add.headers) h) > 16384 THEN 'headers is over the limit of 16384 bytes'
    END;
BEGIN
    IF v_problem IS NOT NULL THEN
        RAISE EXCEPTION 'outbox.add: %', v_problem
            USING ERRCODE = 'invalid_parameter_value', HINT = 'nothing was added; see the rules of a message in the documentation';
    END IF;
    INSERT INTO outbox.message (id, lane, schema_version, available_at, topic, key, tenant, content_type, headers, payload)
    VALUES (v_id, outbox.lane_of(add.key, v_id, add.priority), add.schema_version, add.available_at,
            add.topic, add.key, add.tenant, add.content_type, add.headers, add.payload);
    RETURN v_id;
END
$body$;
COMMENT ON FUNCTION outbox.add(text, bytea, text, text, jsonb, text, integer, text, timestamptz, uuid) IS
    'add a message to this transaction, for triggers and writers that are not Python; gives its id';

CREATE FUNCTION outbox.add(
    topic          text,
    payload        jsonb,
    key            text        DEFAULT NULL,
    tenant         text        DEFAULT NULL,
    headers        jsonb       DEFAULT '{}'::jsonb,
    content_type   text        DEFAULT 'application/json',
    schema_version integer     DEFAULT 1,
    priority       text        DEFAULT 'default',
    available_at   timestamptz DEFAULT NULL,
    id             uuid        DEFAULT NULL
) RETURNS uuid
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $body$
    SELECT outbox.add(topic, convert_to(payload::text, 'UTF8'), key, tenant, headers, content_type,
                      schema_version, priority, available_at, id)
$body$;
COMMENT ON FUNCTION outbox.add(text, jsonb, text, text, jsonb, text, integer, text, timestamptz, uuid) IS
    'add a JSON message to this transaction; gives its id';

-- A literal without a type is text here: PostgreSQL prefers text to bytea and jsonb, between which it could not choose.
CREATE FUNCTION outbox.add(
    topic          text,
    payload        text,
    key            text        DEFAULT NULL,
    tenant         text        DEFAULT NULL,
    headers        jsonb       DEFAULT '{}'::jsonb,
    content_type   text        DEFAULT 'application/json',
    schema_version integer     DEFAULT 1,
    priority       text        DEFAULT 'default',
    available_at   timestamptz DEFAULT NULL,
    id             uuid        DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $body$
BEGIN
    IF add.content_type ~* '^application/([^;]+[+])?json *(;|$)' THEN
        PERFORM add.payload::jsonb;  -- raises what is wrong with it
    ELSIF add.content_type !~* '^text/' THEN
        RAISE EXCEPTION 'outbox.add: payload is text, and content_type is %', add.content_type
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'nothing was added; leave content_type out for JSON, use a text/ type for text, or cast the payload to bytea';
    END IF;
    RETURN outbox.add(add.topic, convert_to(add.payload, 'UTF8'), add.key, add.tenant, add.headers, add.content_type,
                      add.schema_version, add.priority, add.available_at, add.id);
END
$body$;
COMMENT ON FUNCTION outbox.add(text, text, text, text, jsonb, text, integer, text, timestamptz, uuid) IS
    'add a message of JSON or of text, as it is written, to this transaction; gives its id';

-- The doorbell: who sleeps holds the lock exclusively, and only then a writer pays for a
-- NOTIFY, whose own lock serialises commits. The writer's lock is held until commit, so that
-- nobody falls asleep before seeing this transaction's rows. It is tried in the WHEN clause:
-- in the usual case, when nobody sleeps, no function is called.
CREATE FUNCTION outbox.ring_doorbell() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $body$
BEGIN
    PERFORM pg_notify(TG_ARGV[0], '');
    RETURN NULL;
END
$body$;
COMMENT ON FUNCTION outbox.ring_doorbell IS 'wake whoever sleeps on the doorbell; see the page on lanes and leases';

CREATE TRIGGER message_doorbell BEFORE INSERT ON outbox.message
    FOR EACH STATEMENT
    WHEN (NOT pg_try_advisory_xact_lock_shared(1885957228, 100))
    EXECUTE FUNCTION outbox.ring_doorbell('outbox_message');

RESET ROLE;
