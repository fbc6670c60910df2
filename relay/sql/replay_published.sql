-- Does:  Make published messages ready again, with no attempts counted, as if they were new.
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
   -- Another replay may have done it in the meantime.
   AND published_at IS NOT NULL
