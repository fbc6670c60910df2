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
CREATE TABLE inbox.receipt_template (LIKE inbox.receipt);
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
    -- As outbox.message.seq: the transaction is assigned its id first.
    seq            bigint      NOT NULL DEFAULT CASE WHEN pg_current_xact_id() IS NOT NULL
                                                     THEN nextval('inbox.delivery_seq'::regclass) END,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    message_id     uuid        NOT NULL,
    lane           smallint    NOT NULL,
    schema_version integer     NOT NULL,
    attempts       integer     NOT NULL DEFAULT 0,
    available_at   timestamptz,
    acked_at       timestamptz,
    consumer       text        NOT NULL,
    topic          text        NOT NULL,
    key            text,
    tenant         text,
    content_type   text        NOT NULL,
    headers        jsonb       NOT NULL,
    payload        bytea       NOT NULL,
    CONSTRAINT delivery_pkey PRIMARY KEY (seq, created_at),
    CONSTRAINT lane_exists CHECK (lane BETWEEN 0 AND 15),
    CONSTRAINT attempts_not_negative CHECK (attempts >= 0),
    CONSTRAINT available_at_finite CHECK (available_at BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00')
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE inbox.delivery IS 'the queue of the postgres broker: one row per message and subscribed consumer';
COMMENT ON COLUMN inbox.delivery.available_at IS 'null: ready; otherwise when it becomes ready again';

CREATE INDEX delivery_ready_idx ON inbox.delivery (consumer, lane, seq)
    WHERE acked_at IS NULL AND available_at IS NULL;
-- For claims that take turns between tenants, so that one tenant's flood doesn't delay the others.
CREATE INDEX delivery_tenant_idx ON inbox.delivery (consumer, tenant, lane, seq)
    WHERE acked_at IS NULL AND available_at IS NULL AND tenant IS NOT NULL;
CREATE INDEX delivery_waiting_idx ON inbox.delivery (available_at)
    WHERE acked_at IS NULL AND available_at IS NOT NULL;
CREATE TABLE inbox.delivery_template (LIKE inbox.delivery);
ALTER TABLE inbox.delivery_template SET (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.05
);

CREATE TRIGGER delivery_doorbell AFTER INSERT ON inbox.delivery
    FOR EACH STATEMENT
    WHEN (NOT pg_try_advisory_xact_lock_shared(1885957228, 101))
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
CREATE INDEX dead_letter_message_idx ON inbox.dead_letter (message_id) WHERE status = 'PENDING';
CREATE TABLE inbox.dead_letter_template (LIKE inbox.dead_letter);

CREATE VIEW inbox.readable_dead_letter AS
SELECT d.id, d.created_at, d.updated_at, d.status, d.retry_count, d.retry_after, d.origin,
       d.message_id, d.topic, d.key, d.tenant, d.attempts, d.schema_version, d.content_type,
       d.headers, outbox.json_of(d.content_type, d.payload) AS payload_json, d.payload,
       d.error_reason, d.error_stacktrace, d.discard_reason, d.discarded_by
  FROM inbox.dead_letter AS d;
COMMENT ON VIEW inbox.readable_dead_letter IS
    'dead letters, with JSON payloads as JSON; the monitor, which may not read payloads, has no access';

-- Lets a consumer replay the messages that its handlers added, and no other messages.
CREATE FUNCTION outbox.replay_caused_by(cause uuid) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    v_count int;
BEGIN
    UPDATE outbox.message
       SET published_at = NULL
     WHERE headers ? 'causation-id'
       AND headers ->> 'causation-id' = cause::text
       AND created_at >= inbox.moment_of(cause) - interval '1 hour'
       AND published_at IS NOT NULL;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$body$;
COMMENT ON FUNCTION outbox.replay_caused_by IS 'publish the messages again that handling a message has added; returns how many';

RESET ROLE;
