-- Does:  Count a start of a suspect before it happens.
-- Takes: id, at, consumer, only_first (true: unless it is known)
-- Gives: starts, this one included; no row if it is known and was not to be
-- Index: suspect_pkey of one partition
INSERT INTO inbox.suspect AS s (message_id, message_at, consumer, starts)
VALUES (CAST(:id AS uuid), CAST(:at AS timestamptz), CAST(:consumer AS text), 1)
ON CONFLICT (message_id, consumer, message_at) DO UPDATE
   SET starts = s.starts + 1,
       started_at = EXCLUDED.started_at
 WHERE NOT CAST(:only_first AS boolean)
RETURNING starts
