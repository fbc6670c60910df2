-- Does:  Take back a start that was no attempt: the message went back, or asked to be retried later.
-- Takes: id, at, consumer
-- Gives: nothing
-- Index: suspect_pkey of one partition
WITH gone AS (
    DELETE FROM inbox.suspect
     WHERE message_id = CAST(:id AS uuid)
       AND message_at = CAST(:at AS timestamptz)
       AND consumer = CAST(:consumer AS text)
       AND starts = 1
)
UPDATE inbox.suspect
   SET starts = starts - 1
 WHERE message_id = CAST(:id AS uuid)
   AND message_at = CAST(:at AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND starts > 1
