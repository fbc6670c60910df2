-- Does:  List the processes of a side that have recorded within a minute that they run.
-- Takes: {schema} (outbox for relays, inbox for consumers)
-- Gives: the fields of pillarbox.outbox.observability.measures.processes.Process
-- Index: none, reads the few rows of the table
SELECT kind, name, host, role::text, broker, since, failing_since, reason, blocked_keys, in_flight,
       running_id, running_handler, running_since, running_due, standing_by, coalesce(counters, '{}') AS counters
  FROM {schema}.process
 WHERE beat_at >= now() - interval '1 minute'
 ORDER BY name, since, host
