-- Does:  Read the lives of messages, as far as the inbox records them.
-- Takes: ids, first and last (of the moments in the ids), since (of the first day with dead letters)
-- Gives: message_id, at, step, source, consumer, attempts, due_at, by, reason
-- Index: receipt_pkey, suspect_pkey and job_pkey of each partition between first and last; dead_letter_life_idx from since on
SELECT message_id, at, step, source, consumer, attempts, due_at, by, reason
  FROM inbox.message_life
 WHERE message_id = ANY (%(ids)s::uuid[])
   AND (source IN ('inbox.receipt', 'inbox.suspect', 'inbox.job')
        AND partition_at BETWEEN %(first)s::timestamptz AND %(last)s::timestamptz
        OR source = 'inbox.dead_letter'
        AND partition_at >= %(since)s::timestamptz)
