-- Does:  Subtract one start of each of these messages, which was not an attempt.
-- Takes: ids (array as text), first and last of their moments, consumer
-- Gives: nothing
-- Index: suspect_pkey of each partition between first and last
WITH gone AS (
    DELETE FROM inbox.suspect
     WHERE message_id = ANY (CAST(CAST(:ids AS text) AS uuid[]))
       AND message_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
       AND consumer = CAST(:consumer AS text)
       AND starts = 1
)
UPDATE inbox.suspect
   SET starts = starts - 1
 WHERE message_id = ANY (CAST(CAST(:ids AS text) AS uuid[]))
   AND message_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
   AND consumer = CAST(:consumer AS text)
   AND starts > 1
