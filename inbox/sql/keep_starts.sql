-- Does:  Keep the failures of a message that goes back, for whoever gets it next.
-- Takes: id, at, consumer, starts
-- Gives: nothing
-- Index: suspect_pkey of one partition
INSERT INTO inbox.suspect AS s (message_id, message_at, consumer, starts)
VALUES (CAST(:id AS uuid), CAST(:at AS timestamptz), CAST(:consumer AS text), CAST(:starts AS integer))
ON CONFLICT (message_id, consumer, message_at) DO UPDATE
   SET starts = greatest(s.starts, EXCLUDED.starts)
