-- Does:  Record that the broker acked these messages.
-- Takes: ids, first and last created_at of the batch
-- Gives: nothing
-- Index: message_pkey on each partition between first and last
UPDATE outbox.message
   SET published_at = clock_timestamp()
 WHERE id = ANY (%(ids)b::uuid[])
   AND created_at BETWEEN %(first)s AND %(last)s
   AND published_at IS NULL
   AND dead_lettered_at IS NULL
