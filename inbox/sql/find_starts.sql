-- Does:  Find how often a suspect was started.
-- Takes: id, at, consumer
-- Gives: starts; no row if the message is unknown
-- Index: suspect_pkey of one partition
SELECT starts
  FROM inbox.suspect
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
