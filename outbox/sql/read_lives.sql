-- Does:  Read what happened to messages, as far as the outbox knows.
-- Takes: ids, first and last (of their created_at), first_bin and last_bin (of their marks' created_at), since (of the first day with dead letters)
-- Gives: message_id, message_at, at, step, source, run, attempts, due_at, by, reason
-- Index: message_pkey, settlement_lane_idx and deferral_message_idx of each partition between first and last; dead_letter_life_idx from since on
SELECT message_id, message_at, at, step, source, run, attempts, due_at, by, reason
  FROM outbox.message_life
 WHERE message_id = ANY (%(ids)s::uuid[])
   AND (source IN ('outbox.message', 'outbox.deferral')
        AND partition_at BETWEEN %(first)s::timestamptz AND %(last)s::timestamptz
        OR source = 'outbox.settlement'
        AND message_at BETWEEN %(first)s::timestamptz AND %(last)s::timestamptz
        AND partition_at BETWEEN %(first_bin)s::timestamptz AND %(last_bin)s::timestamptz
        OR source = 'outbox.dead_letter'
        AND partition_at >= %(since)s::timestamptz)
