-- Does:  Read the states of messages in the outbox.
-- Takes: ids, first and last (of their created_at)
-- Gives: id, created_at, and the fields of outbox.observability.message_life.Status; of several readers, one that has not published a message comes last
-- Index: message_pkey, position_seq_idx and deferral_message_idx of each partition between first and last
SELECT id, created_at, state, run, attempts, available_at, published_at, last_error, reader
  FROM outbox.message_status
 WHERE id = ANY (%(ids)s::uuid[])
   AND created_at BETWEEN %(first)s::timestamptz AND %(last)s::timestamptz
 ORDER BY state IN ('published', 'discarded') DESC, reader DESC
