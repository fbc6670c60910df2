-- Does:  Read the states of messages in the outbox.
-- Takes: ids, first and last (of their created_at)
-- Gives: id, created_at, state, run, attempts, available_at, published_at, last_error, reader, is_consumer (the reader); of several readers, one that has not settled a message comes last, and before it one that has published it
-- Index: message_pkey, position_seq_idx and deferral_message_idx of each partition between first and last
SELECT id, created_at, state, run, attempts, available_at, published_at, last_error, s.reader,
       EXISTS (SELECT FROM outbox.reader AS r WHERE r.reader = s.reader AND r.broker = 'direct') AS is_consumer
  FROM outbox.message_status AS s
 WHERE id = ANY (%(ids)s::uuid[])
   AND created_at BETWEEN %(first)s::timestamptz AND %(last)s::timestamptz
 ORDER BY state IN ('published', 'handled', 'discarded') DESC, state = 'published', s.reader DESC
