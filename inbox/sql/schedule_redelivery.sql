-- Does:  Count a failed attempt for these deliveries and schedule their redelivery.
-- Takes: seqs, delays (seconds), attempts (as claimed), first and last created_at of the batch
-- Gives: nothing
-- Index: delivery_pkey on each partition between first and last
UPDATE inbox.delivery AS d
   SET available_at = clock_timestamp() + make_interval(secs => failed.delay),
       attempts = d.attempts + 1
  FROM unnest(%(seqs)s::bigint[], %(delays)s::float8[], %(attempts)s::int[])
       AS failed (seq, delay, attempts)
 WHERE d.seq = failed.seq
   -- Said twice, so that no plan reads whole partitions.
   AND d.seq = ANY (%(seqs)s::bigint[])
   AND d.created_at BETWEEN %(first)s AND %(last)s
   -- Whoever settled it in the meantime was right.
   AND d.attempts = failed.attempts
   AND d.acked_at IS NULL
