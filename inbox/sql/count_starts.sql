-- Does:  Count a start of each of these suspects, before their handlers are called.
-- Takes: ids and moments (arrays as text, in the same order), consumer, unless_open (true: not if an earlier start never finished)
-- Gives: message_id, starts (including this one); no row for a message whose start was not counted
-- Index: suspect_pkey of the partitions of their days
INSERT INTO inbox.suspect AS s (message_id, message_at, consumer, starts)
SELECT id, moment, CAST(:consumer AS text), 1
  FROM unnest(CAST(CAST(:ids AS text) AS uuid[]), CAST(CAST(:moments AS text) AS timestamptz[])) AS r (id, moment)
ON CONFLICT (message_id, consumer, message_at) DO UPDATE
   SET starts = least(s.starts, 2147483646) + 1,
       started_at = EXCLUDED.started_at,
       is_open = true
 WHERE NOT (s.is_open AND CAST(:unless_open AS boolean))
RETURNING message_id, starts
