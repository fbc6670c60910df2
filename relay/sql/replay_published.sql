-- Does:  Request that published messages be published again.
-- Takes: reader, ids, first and last created_at of the batch
-- Gives: nothing but the row count
-- Index: message_pkey, position_seq_idx and deferral_message_idx on each partition between first and last
INSERT INTO outbox.deferral (created_at, due_at, seq, id, run, lane, cause, reader, key, requested_by)
SELECT created_at, clock_timestamp(), seq, id, run + 1, lane, 'replayed', reader, key, session_user
  FROM outbox.message_status
 WHERE id = ANY (%(ids)s::uuid[])
   AND created_at BETWEEN %(first)s AND %(last)s
   -- Another replay may have requested it in the meantime.
   AND state IN ('published', 'handled')
   AND (reader = %(reader)s) IS TRUE
 ORDER BY seq
