-- Does:  Keep the failed attempts of a message that is given back; none of them killed its process.
-- Takes: id, at, consumer, starts
-- Gives: nothing
-- Index: suspect_pkey of one partition
INSERT INTO inbox.suspect AS s (message_id, message_at, consumer, starts, is_open)
VALUES (CAST(:id AS uuid), CAST(:at AS timestamptz), CAST(:consumer AS text), CAST(:starts AS integer), false)
ON CONFLICT (message_id, consumer, message_at) DO UPDATE
   SET starts = greatest(s.starts, EXCLUDED.starts),
       is_open = false
