-- Does:  Return the last error of a message's handler.
-- Takes: id, at (of the id), consumer
-- Gives: error_reason, error_stacktrace; no row if nothing is known
-- Index: suspect_pkey of one partition
SELECT error_reason, error_stacktrace
  FROM inbox.suspect
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND error_reason IS NOT NULL
