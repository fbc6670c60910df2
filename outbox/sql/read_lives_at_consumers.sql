-- Does:  Read what happened to messages, as far as the inbox knows.
-- Takes: ids, first and last (of the moments in the ids), delivered_from and delivered_until (when they may have been delivered), first_bin (of the marks of these deliveries), since (of the first day with dead letters)
-- Gives: message_id, at, step, source, consumer, attempts, due_at, by, reason
-- Index: receipt_pkey, suspect_pkey and job_pkey of each partition between first and last; delivery_message_idx, ack_lane_idx and redelivery_delivery_idx where they may have been delivered; dead_letter_life_idx from since on
SELECT message_id, at, step, source, consumer, attempts, due_at, by, reason
  FROM inbox.message_life
 WHERE message_id = ANY (%(ids)s::uuid[])
   AND (source IN ('inbox.delivery', 'inbox.ack', 'inbox.redelivery')
        AND delivery_at BETWEEN %(delivered_from)s::timestamptz AND %(delivered_until)s::timestamptz
        AND partition_at BETWEEN %(first_bin)s::timestamptz AND %(delivered_until)s::timestamptz
        OR source IN ('inbox.receipt', 'inbox.suspect', 'inbox.job')
        AND partition_at BETWEEN %(first)s::timestamptz AND %(last)s::timestamptz
        OR source = 'inbox.dead_letter'
        AND partition_at >= %(since)s::timestamptz)
