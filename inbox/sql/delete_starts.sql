-- Does:  Delete the starts of messages that have their outcome.
-- Takes: ids (array as text), first and last of their moments, consumer
-- Gives: nothing
-- Index: suspect_pkey of each partition between first and last
DELETE FROM inbox.suspect
 WHERE message_id = ANY (CAST(CAST(:ids AS text) AS uuid[]))
   AND message_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
   AND consumer = CAST(:consumer AS text)
