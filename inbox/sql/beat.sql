-- Does:  Record that this consumer runs, with its state, or that it ends; return the paused topics.
-- Takes: id, kind, name, host, broker, failing_since (as text), reason, blocked_keys, in_flight, ends, running_id, running_handler, running_since, running_due (moments as text), standing_by, counters (JSON as text)
-- Gives: the topics that are paused for it
-- Index: process_pkey
SELECT outbox.paused_topics(:name) FROM inbox.beat(CAST(CAST(:id AS text) AS uuid), :kind, :name, :host, :broker,
                  CAST(CAST(:failing_since AS text) AS timestamptz), :reason, :blocked_keys, :in_flight, :ends,
                  CAST(CAST(:running_id AS text) AS uuid), CAST(:running_handler AS text),
                  CAST(CAST(:running_since AS text) AS timestamptz), CAST(CAST(:running_due AS text) AS timestamptz),
                  CAST(:standing_by AS text),
                  CAST(CAST(:counters AS text) AS jsonb))
