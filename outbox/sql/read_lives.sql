-- Does:  Read the lives of messages, as far as the outbox records them.
-- Takes: ids, first and last (of their created_at), since (of the first day with dead letters)
-- Gives: message_id, at, step, source, run, attempts, due_at, by, reason, consumer (which read it; null: a relay, or nobody)
-- Index: message_pkey, position_seq_idx and deferral_message_idx of each partition between first and last; dead_letter_life_idx from since on
SELECT message_id, at, step, source, run, attempts, due_at, by, reason,
       (SELECT r.reader FROM outbox.reader AS r WHERE r.reader = l.reader AND r.broker = 'direct') AS consumer
  FROM outbox.message_life AS l
 WHERE message_id = ANY (%(ids)s::uuid[])
   AND (source IN ('outbox.message', 'outbox.position', 'outbox.deferral')
        AND partition_at BETWEEN %(first)s::timestamptz AND %(last)s::timestamptz
        OR source = 'outbox.dead_letter'
        AND partition_at >= %(since)s::timestamptz)
