-- Does:  Store the failed attempts of messages that are returned to the broker; none of them killed its process.
-- Takes: ids, moments and starts (arrays as text, in the same order), consumer
-- Gives: nothing
-- Index: suspect_pkey of the partitions of their days
INSERT INTO inbox.suspect AS s (message_id, message_at, consumer, starts, is_open)
SELECT id, moment, CAST(:consumer AS text), starts, false
  FROM unnest(CAST(CAST(:ids AS text) AS uuid[]), CAST(CAST(:moments AS text) AS timestamptz[]),
              CAST(CAST(:starts AS text) AS integer[])) AS r (id, moment, starts)
ON CONFLICT (message_id, consumer, message_at) DO UPDATE
   SET starts = greatest(s.starts, EXCLUDED.starts),
       is_open = false
