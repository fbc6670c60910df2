-- Owner part, run for each schema, outbox and inbox: the objects that both have.

CREATE TABLE {schema}.process (
    id            uuid        NOT NULL,
    since         timestamptz NOT NULL DEFAULT now(),
    beat_at       timestamptz NOT NULL DEFAULT now(),
    failing_since timestamptz,
    blocked_keys  integer     NOT NULL,
    in_flight     integer     NOT NULL,
    kind          text        NOT NULL,
    name          text        NOT NULL,
    host          text        NOT NULL,
    broker        text        NOT NULL,
    reason        text,
    running_id    uuid,
    running_handler text,
    running_since timestamptz,
    running_due   timestamptz,
    standing_by   text,
    counters      jsonb,
    role          name        NOT NULL DEFAULT session_user,
    CONSTRAINT process_pkey PRIMARY KEY (id)
) WITH (fillfactor = 50);  -- a beat changes no indexed column: each of them is a HOT update
COMMENT ON COLUMN {schema}.process.host IS 'the name of its host, and its process id there';
COMMENT ON COLUMN {schema}.process.broker IS 'where it publishes to or receives from, without credentials';
COMMENT ON COLUMN {schema}.process.failing_since IS 'since when something has kept failing; null: nothing fails';
COMMENT ON COLUMN {schema}.process.reason IS 'the last failure, as in the process''s log';
COMMENT ON COLUMN {schema}.process.blocked_keys IS 'keys whose first message waits for another attempt in this process';
COMMENT ON COLUMN {schema}.process.in_flight IS 'batches that are being published, or messages that are being handled';
COMMENT ON COLUMN {schema}.process.running_id IS
    'the message whose handler has been running for longest, if for more than a few seconds; one that is overdue comes first';
COMMENT ON COLUMN {schema}.process.running_handler IS 'that handler';
COMMENT ON COLUMN {schema}.process.running_since IS 'when it was called';
COMMENT ON COLUMN {schema}.process.running_due IS 'when it is or was overdue; null: never';
COMMENT ON COLUMN {schema}.process.standing_by IS
    'the topics that another replica receives, so that this one stands by for them; null: none';
COMMENT ON COLUMN {schema}.process.counters IS
    'since it started, for each topic: published or handled, failed, and how many took how long, in buckets';
COMMENT ON COLUMN {schema}.process.role IS 'the login that inserted it: no other one can change it';

-- A beat must not wait for long, since the process has other work.
CREATE FUNCTION {schema}.beat(id uuid, kind text, name text, host text, broker text, failing_since timestamptz, reason text,
                            blocked_keys integer, in_flight integer, ends boolean, running_id uuid DEFAULT NULL,
                            running_handler text DEFAULT NULL, running_since timestamptz DEFAULT NULL,
                            running_due timestamptz DEFAULT NULL, standing_by text DEFAULT NULL,
                            counters jsonb DEFAULT NULL) RETURNS void
LANGUAGE sql SECURITY DEFINER {pinned}
SET row_security = off
SET lock_timeout = '1s'
BEGIN ATOMIC
    DELETE FROM {schema}.process AS p
     WHERE p.id IN (SELECT q.id FROM {schema}.process AS q
                     WHERE CASE WHEN q.id = beat.id THEN beat.ends AND q.role = session_user
                                ELSE q.beat_at < now() - interval '1 minute' END
                       FOR UPDATE SKIP LOCKED);
    INSERT INTO {schema}.process AS p (id, kind, name, host, broker, failing_since, reason, blocked_keys, in_flight,
                                       running_id, running_handler, running_since, running_due, standing_by, counters)
    SELECT beat.id, left(beat.kind, 500), left(beat.name, 500), left(beat.host, 500), left(beat.broker, 500), beat.failing_since,
           left(beat.reason, 500), beat.blocked_keys, beat.in_flight,
           beat.running_id, left(beat.running_handler, 500), beat.running_since, beat.running_due,
           left(beat.standing_by, 500), beat.counters
     WHERE NOT beat.ends
        ON CONFLICT ON CONSTRAINT process_pkey DO UPDATE
       SET beat_at = now(), failing_since = excluded.failing_since, reason = excluded.reason,
           blocked_keys = excluded.blocked_keys, in_flight = excluded.in_flight,
           running_id = excluded.running_id, running_handler = excluded.running_handler,
           running_since = excluded.running_since, running_due = excluded.running_due,
           standing_by = excluded.standing_by, counters = excluded.counters
     WHERE p.role = session_user;
END;
COMMENT ON FUNCTION {schema}.beat IS 'record that a process runs, or with ends, that it ends; deletes the rows of processes that are gone';

CREATE TABLE {schema}.dead_letter (
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
    priority         text        NOT NULL DEFAULT 'default',
    content_type     text        NOT NULL,
    headers          jsonb       NOT NULL,
    payload          bytea       NOT NULL,
    error_reason     text        NOT NULL,
    error_stacktrace text,
    discard_reason   text,
    discarded_by     text,
    CONSTRAINT dead_letter_pkey PRIMARY KEY (id, created_at),
    CONSTRAINT status_known CHECK (status IN ('PENDING', 'SUCCEEDED', 'DISCARDED')),
    CONSTRAINT priority_known CHECK (priority IN ('realtime', 'default', 'bulk')),
    -- Lists load these. A message with more goes into one header, which they don't load.
    CONSTRAINT names_size CHECK (greatest(octet_length(origin), octet_length(message_id), octet_length(topic), octet_length(key),
                                          octet_length(tenant), octet_length(content_type)) <= 65536),
    CONSTRAINT reasons_size CHECK (greatest(octet_length(error_reason), octet_length(discard_reason), octet_length(discarded_by)) <= 16384
                                   AND octet_length(error_stacktrace) <= 131072),
    CONSTRAINT discarded_with_a_reason CHECK (status <> 'DISCARDED' OR discard_reason IS NOT NULL)
) PARTITION BY RANGE (created_at);
COMMENT ON COLUMN {schema}.dead_letter.origin IS 'what dead-lettered it: relay:<reader> or consumer:<name>';
COMMENT ON COLUMN {schema}.dead_letter.retry_count IS 'failed retries since it was dead-lettered; attempts counts the failures before';
COMMENT ON COLUMN {schema}.dead_letter.retry_after IS 'when the schedule may retry it; null: only by hand';

CREATE INDEX dead_letter_status_idx ON {schema}.dead_letter (status, created_at);
CREATE INDEX dead_letter_topic_idx ON {schema}.dead_letter (topic, created_at);
CREATE INDEX dead_letter_reason_idx ON {schema}.dead_letter (left(error_reason, 80), created_at);
CREATE INDEX dead_letter_retry_idx ON {schema}.dead_letter (retry_after) WHERE status = 'PENDING';
-- To find out whether a message has been dead-lettered.
CREATE INDEX dead_letter_message_idx ON {schema}.dead_letter (message_id);
-- For {schema}.message_life, by uuid.
CREATE INDEX dead_letter_life_idx ON {schema}.dead_letter
    ((CASE WHEN message_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN message_id::uuid END));

CREATE VIEW {schema}.readable_dead_letter AS
SELECT d.id, d.created_at, d.updated_at, d.status, d.retry_count, d.retry_after, d.origin,
       d.message_id, d.topic, d.key, d.tenant, d.attempts, d.schema_version, d.priority, d.content_type,
       outbox.readable_headers(d.headers) AS headers,
       outbox.json_of(d.content_type, d.payload) AS payload_json, d.payload,
       d.error_reason, d.error_stacktrace, d.discard_reason, d.discarded_by
  FROM {schema}.dead_letter AS d;
COMMENT ON VIEW {schema}.readable_dead_letter IS
    'dead letters, with JSON payloads as JSON; the monitor, which may not read payloads, has no access';

CREATE VIEW {schema}.dead_letter_status AS
SELECT d.id, d.created_at, d.updated_at, d.status, d.retry_count, d.retry_after, d.origin,
       d.message_id, d.topic, d.key, d.tenant, d.attempts, d.schema_version, d.priority, d.content_type,
       d.error_reason, d.discard_reason, d.discarded_by
  FROM {schema}.dead_letter AS d;
COMMENT ON VIEW {schema}.dead_letter_status IS 'dead letters without payload, headers and stack trace';
