-- Does:  Forget the starts of a message that has its outcome.
-- Takes: id, at, consumer
-- Gives: nothing
-- Index: suspect_pkey of one partition
DELETE FROM inbox.suspect
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
