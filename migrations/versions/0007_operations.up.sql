-- Owner part: operations on many rows at once, which people started on the page.

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
    CONSTRAINT kind_known CHECK (kind IN ('retry', 'discard')),
    CONSTRAINT state_known CHECK (state IN ('running', 'stopping', 'stopped', 'done', 'failed')),
    CONSTRAINT finished_in_the_end CHECK ((finished_at IS NULL) = (state IN ('running', 'stopping'))),
    CONSTRAINT discarded_with_a_reason CHECK (kind <> 'discard' OR reason <> ''),
    CONSTRAINT selection_of_strings CHECK ((selection @? 'strict $.* ? (@.type() <> "string")') IS FALSE)
);
COMMENT ON TABLE outbox.operation IS 'what people had pillarbox web do: one row for each retry or discard of one or many dead letters';
COMMENT ON COLUMN outbox.operation.selection IS 'the filter, with the moment up to which it selects';
COMMENT ON COLUMN outbox.operation.asked_by IS 'the name by which that person logged in to the page';
COMMENT ON COLUMN outbox.operation.asked_as IS 'the database login of the page';
COMMENT ON COLUMN outbox.operation.state IS 'running, stopping; then stopped, done or failed';
COMMENT ON COLUMN outbox.operation.expected IS 'how many the dry run counted';
COMMENT ON COLUMN outbox.operation.stopped_by IS 'the name of the person who stopped it';

CREATE INDEX operation_asked_idx ON outbox.operation (asked_at);

-- Infinity in one row would hold its partition for ever, or empty every list that shows it: Python has
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
