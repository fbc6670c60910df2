-- Does:  Return how often these suspects were started.
-- Takes: ids (array as text), first and last of their moments, consumer
-- Gives: message_id, starts; no row for an unknown message
-- Index: suspect_pkey of each partition between first and last
SELECT message_id, starts
  FROM inbox.suspect
 WHERE message_id = ANY (CAST(CAST(:ids AS text) AS uuid[]))
   AND message_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
   AND consumer = CAST(:consumer AS text)
