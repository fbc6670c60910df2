-- Does:  Record that this relay runs, with its state, or that it ends.
-- Takes: id, kind, name, host, broker, failing_since, reason, blocked_keys, in_flight, ends, counters (JSON)
-- Gives: nothing
-- Index: process_pkey
SELECT outbox.beat(%(id)s, %(kind)s, %(name)s, %(host)s, %(broker)s, %(failing_since)s, %(reason)s,
                   %(blocked_keys)s, %(in_flight)s, %(ends)s, counters => %(counters)s::jsonb)
