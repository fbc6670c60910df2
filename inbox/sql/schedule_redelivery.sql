-- Does:  Write down that the consumer failed with these deliveries, and when to hand them over again.
-- Takes: seqs, delays (seconds; null: at once), found (attempts as last written), attempts (to write), first and last created_at of the batch
-- Gives: nothing
-- Index: delivery_pkey on each partition between first and last
UPDATE inbox.delivery AS d
   SET available_at = clock_timestamp() + make_interval(secs => failed.delay),
       attempts = failed.attempts
  FROM unnest(%(seqs)s::bigint[], %(delays)s::float8[], %(found)s::int[], %(attempts)s::int[])
       AS failed (seq, delay, found, attempts)
 WHERE d.seq = failed.seq
   -- Said twice, so that no plan reads whole partitions.
   AND d.seq = ANY (%(seqs)s::bigint[])
   AND d.created_at BETWEEN %(first)s AND %(last)s
   -- Whoever settled it in the meantime was right.
   AND d.attempts = failed.found
   AND d.acked_at IS NULL
