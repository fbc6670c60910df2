-- Owner part: operations that people start: on many rows at once, and pauses of consumers.

CREATE TABLE outbox.operation (
    id          uuid        NOT NULL DEFAULT gen_random_uuid(),
    kind        text        NOT NULL,
    selection   jsonb       NOT NULL,
    reason      text        NOT NULL,
    asked_by    text        NOT NULL,
    asked_as    text        NOT NULL DEFAULT session_user,
    asked_at    timestamptz NOT NULL DEFAULT now(),
    state       text        NOT NULL DEFAULT 'running',
    expected    bigint      NOT NULL,
    succeeded   bigint      NOT NULL DEFAULT 0,
    failed      bigint      NOT NULL DEFAULT 0,
    skipped     bigint      NOT NULL DEFAULT 0,
    problem     text,
    finished_at timestamptz,
    stopped_by  text,
    CONSTRAINT operation_pkey PRIMARY KEY (id),
    CONSTRAINT kind_known CHECK (kind IN ('retry', 'discard', 'pause', 'resume')),
    CONSTRAINT state_known CHECK (state IN ('running', 'stopping', 'stopped', 'done', 'failed')),
    CONSTRAINT finished_in_the_end CHECK ((finished_at IS NULL) = (state IN ('running', 'stopping'))),
    CONSTRAINT changed_with_a_reason CHECK (kind NOT IN ('discard', 'pause') OR reason <> ''),
    CONSTRAINT selection_of_strings CHECK ((selection @? 'strict $.* ? (@.type() <> "string")') IS FALSE)
);
COMMENT ON TABLE outbox.operation IS 'a row for each retry or discard of dead letters on the page, and each pause or resume of a consumer or a topic';
COMMENT ON COLUMN outbox.operation.selection IS 'the filter, with the moment up to which it selects; of a pause, consumer and topic, each missing for all';
COMMENT ON COLUMN outbox.operation.asked_by IS 'the name with which the person logged in to the page, or the database login of a command';
COMMENT ON COLUMN outbox.operation.asked_as IS 'the database login of the page or the command';
COMMENT ON COLUMN outbox.operation.state IS 'running, stopping; then stopped, done or failed. A pause is running until it is ended, then stopped';
COMMENT ON COLUMN outbox.operation.expected IS 'how many the dry run counted';
COMMENT ON COLUMN outbox.operation.stopped_by IS 'the name of the person who stopped it';

CREATE INDEX operation_asked_idx ON outbox.operation (asked_at);
CREATE UNIQUE INDEX operation_pause_idx ON outbox.operation (selection) WHERE kind = 'pause' AND state = 'running';

CREATE FUNCTION outbox.pause(consumer text, topic text, reason text, person text DEFAULT session_user) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER {pinned}
BEGIN ATOMIC
    INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected)
    SELECT 'pause', jsonb_strip_nulls(jsonb_build_object('consumer', pause.consumer, 'topic', pause.topic)), pause.reason, pause.person, 0
        ON CONFLICT DO NOTHING
    RETURNING true;
END;
COMMENT ON FUNCTION outbox.pause IS
    'pause a consumer (null: all), or a topic of it: no handler of it begins; returns null if that is paused already';

CREATE FUNCTION outbox.resume(consumer text, topic text, reason text, person text DEFAULT session_user) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER {pinned}
BEGIN ATOMIC
    WITH ended AS (
        UPDATE outbox.operation AS o
           SET state = 'stopped', finished_at = clock_timestamp(), stopped_by = resume.person
         WHERE o.kind = 'pause' AND o.state = 'running'
           AND o.selection = jsonb_strip_nulls(jsonb_build_object('consumer', resume.consumer, 'topic', resume.topic))
        RETURNING o.selection)
    INSERT INTO outbox.operation (kind, selection, reason, asked_by, state, expected, finished_at)
    SELECT 'resume', e.selection, resume.reason, resume.person, 'done', 0, clock_timestamp() FROM ended AS e
    RETURNING true;
END;
COMMENT ON FUNCTION outbox.resume IS 'end the pause that outbox.pause() began with this consumer and topic; returns null if there is none';

CREATE FUNCTION outbox.paused_topics(consumer text) RETURNS text[]
LANGUAGE sql STABLE SECURITY DEFINER {pinned}
BEGIN ATOMIC
    SELECT coalesce(array_agg(coalesce(o.selection ->> 'topic', '*')), '{}'::text[])
      FROM outbox.operation AS o
     WHERE o.kind = 'pause' AND o.state = 'running'
       AND coalesce(o.selection ->> 'consumer', paused_topics.consumer) = paused_topics.consumer;
END;
COMMENT ON FUNCTION outbox.paused_topics IS 'the topics, and prefixes followed by a star, that are paused for a consumer';

-- Infinity in one row would hold its partition forever, or make every list that shows it fail: Python has
-- no datetime outside of these years. No BETWEEN, which a dump would write in another form.
EXECUTE EACH
SELECT format('ALTER TABLE %s ADD CONSTRAINT moments_finite CHECK (%s) NOT VALID', c.oid::regclass,
              string_agg(format('%1$I >= ''0001-01-01 00:00:00+00'' AND %1$I <= ''9999-12-31 00:00:00+00''', a.attname),
                         ' AND ' ORDER BY a.attnum))
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
 WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
   AND c.relkind IN ('r', 'p') AND NOT c.relispartition
   AND a.atttypid = 'timestamptz'::regtype AND NOT a.attisdropped
 GROUP BY c.oid;
