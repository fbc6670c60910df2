-- Does:  Write down that the consumer acked these deliveries.
-- Takes: seqs, first and last created_at of the batch
-- Gives: nothing
-- Index: delivery_pkey on each partition between first and last
UPDATE inbox.delivery
   SET acked_at = clock_timestamp()
 WHERE seq = ANY (%(seqs)s::bigint[])
   AND created_at BETWEEN %(first)s AND %(last)s
   AND acked_at IS NULL
