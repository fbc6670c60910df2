-- Does:  Count a start of a suspect before its handler is called.
-- Takes: id, at, consumer, unless_open (true: not if an earlier start never came to an end)
-- Gives: starts, including this one; no row if it was not counted
-- Index: suspect_pkey of one partition
INSERT INTO inbox.suspect AS s (message_id, message_at, consumer, starts)
VALUES (CAST(:id AS uuid), CAST(:at AS timestamptz), CAST(:consumer AS text), 1)
ON CONFLICT (message_id, consumer, message_at) DO UPDATE
   SET starts = s.starts + 1,
       started_at = EXCLUDED.started_at,
       is_open = true
 WHERE NOT (s.is_open AND CAST(:unless_open AS boolean))
RETURNING starts
