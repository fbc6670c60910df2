-- Does:  Record that this consumer runs and how it does, or that it ends.
-- Takes: id, kind, name, host, broker, failing_since (as text), reason, blocked_keys, in_flight, ends
-- Gives: nothing
-- Index: process_pkey
SELECT inbox.beat(CAST(CAST(:id AS text) AS uuid), :kind, :name, :host, :broker,
                  CAST(CAST(:failing_since AS text) AS timestamptz), :reason, :blocked_keys, :in_flight, :ends)
