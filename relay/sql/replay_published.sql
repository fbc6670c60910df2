-- Does:  Make published messages ready once more, as if they were new: with all their attempts.
-- Takes: ids, first and last created_at of the batch
-- Gives: nothing; the row count
-- Index: message_pkey on each partition between first and last
UPDATE outbox.message
   SET published_at = NULL,
       available_at = NULL,
       attempts = 0,
       last_error = NULL
 WHERE id = ANY (%(ids)s::uuid[])
   AND created_at BETWEEN %(first)s AND %(last)s
   -- Whoever replayed it in the meantime did what we wanted.
   AND published_at IS NOT NULL
