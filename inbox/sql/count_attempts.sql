-- Does:  Count an attempt for deliveries that may have killed a replica, before they are handed out.
-- Takes: seqs, attempts (as claimed), first and last created_at of the batch
-- Gives: seq of each that nobody has settled
-- Index: delivery_pkey on each partition between first and last
UPDATE inbox.delivery AS d
   SET attempts = d.attempts + 1
  FROM unnest(%(seqs)s::bigint[], %(attempts)s::int[]) AS suspect (seq, attempts)
 WHERE d.seq = suspect.seq
   -- Said twice, so that no plan reads whole partitions.
   AND d.seq = ANY (%(seqs)s::bigint[])
   AND d.created_at BETWEEN %(first)s AND %(last)s
   AND d.attempts = suspect.attempts
   AND d.acked_at IS NULL
RETURNING d.seq
