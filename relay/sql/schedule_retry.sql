-- Does:  Record that the broker nacked these messages, and when to retry them.
-- Takes: ids, delays (seconds), reasons, attempts (as claimed), charge (1, or 0 if they were postponed), first and last created_at of the batch
-- Gives: nothing
-- Index: message_pkey on each partition between first and last
UPDATE outbox.message AS m
   SET available_at = clock_timestamp() + make_interval(secs => nacked.delay),
       -- At least one, which distinguishes it from a scheduled message and blocks its key.
       attempts = greatest(least(m.attempts, 2147483646) + %(charge)s::int, 1),
       last_error = nacked.reason
  FROM unnest(%(ids)s::uuid[], %(delays)s::float8[], %(reasons)s::text[], %(attempts)s::int[])
       AS nacked (id, delay, reason, attempts)
 WHERE m.id = nacked.id
   AND m.created_at BETWEEN %(first)s AND %(last)s
   -- Another relay may have settled it in the meantime.
   AND m.attempts = nacked.attempts
   AND m.published_at IS NULL
   AND m.dead_lettered_at IS NULL
