-- Owner part: the leased receipts of handlers that run too long for one transaction, and the suspects.

CREATE TABLE inbox.job (
    message_id          uuid        NOT NULL,
    message_at          timestamptz NOT NULL,
    consumer            text        NOT NULL,
    state               text        NOT NULL DEFAULT 'queued',
    lease               integer     NOT NULL DEFAULT 0,
    attempts            integer     NOT NULL DEFAULT 0,
    lease_until         timestamptz,
    queued_at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at          timestamptz,
    cancel_requested_at timestamptz,
    finished_at         timestamptz,
    topic               text,
    key                 text,
    tenant              text,
    worker              text,
    reason              text,
    checkpoint          jsonb,
    CONSTRAINT job_pkey PRIMARY KEY (message_id, consumer, message_at),
    CONSTRAINT message_at_from_id CHECK (message_at = inbox.moment_of(message_id)),
    CONSTRAINT message_id_is_uuid7 CHECK (get_byte(uuid_send(message_id), 6) >> 4 = 7),
    CONSTRAINT state_known CHECK (state IN ('queued', 'in_progress', 'waiting', 'success', 'failure', 'cancelled', 'timed_out', 'skipped')),
    CONSTRAINT texts_size CHECK (greatest(octet_length(topic), octet_length(key), octet_length(tenant)) <= 65536
                                 AND greatest(octet_length(worker), octet_length(reason)) <= 16384),
    CONSTRAINT finished_in_the_end CHECK ((finished_at IS NULL) = (state IN ('queued', 'in_progress', 'waiting')))
) PARTITION BY RANGE (message_at);
COMMENT ON TABLE inbox.job IS 'leased receipts: one row per message of a long handler';
COMMENT ON COLUMN inbox.job.state IS 'queued, in_progress, waiting (to be cancelled); then success, failure, cancelled, timed_out or skipped';
COMMENT ON COLUMN inbox.job.lease IS 'number of the current lease: a worker with another number has lost its lease';
COMMENT ON COLUMN inbox.job.attempts IS 'how often it was started, not counting starts that were released';
COMMENT ON COLUMN inbox.job.lease_until IS 'by the server''s clock; null: not leased';
COMMENT ON COLUMN inbox.job.worker IS 'host and process of the current or last lease';
COMMENT ON COLUMN inbox.job.checkpoint IS 'what the handler saved, for the next start';

-- Few jobs are open, and heartbeats change no indexed column.
CREATE INDEX job_open_idx ON inbox.job (consumer, queued_at) WHERE finished_at IS NULL;

CREATE TABLE inbox.suspect (
    message_id  uuid        NOT NULL,
    message_at  timestamptz NOT NULL,
    consumer    text        NOT NULL,
    starts      integer     NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    is_open     boolean     NOT NULL DEFAULT true,
    error_reason     text,
    error_stacktrace text,
    CONSTRAINT suspect_pkey PRIMARY KEY (message_id, consumer, message_at),
    CONSTRAINT message_at_from_id CHECK (message_at = inbox.moment_of(message_id)),
    CONSTRAINT message_id_is_uuid7 CHECK (get_byte(uuid_send(message_id), 6) >> 4 = 7),
    CONSTRAINT started_once_at_least CHECK (starts > 0),
    CONSTRAINT reasons_size CHECK (octet_length(error_reason) <= 16384 AND octet_length(error_stacktrace) <= 131072)
) PARTITION BY RANGE (message_at);
COMMENT ON TABLE inbox.suspect IS
    'messages that may have been started before and have no outcome: one of them may kill the process that handles it';
COMMENT ON COLUMN inbox.suspect.starts IS 'how often its handler was started; counted before each call, deleted with the outcome';
COMMENT ON COLUMN inbox.suspect.started_at IS 'when it was last started';
COMMENT ON COLUMN inbox.suspect.is_open IS 'its last start may not have ended: it is handled alone next time';
COMMENT ON COLUMN inbox.suspect.error_reason IS 'what its handler raised last, for the dead letter; null: nothing is known';
