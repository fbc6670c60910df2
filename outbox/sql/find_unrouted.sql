-- Does:  Find topics of messages that no reader gets, and the last seq drawn.
-- Takes: above (a seq above which to look)
-- Gives: seq (above which to look next), messages, topics (up to 20)
-- Index: message_lane_idx; reads all messages above
SELECT coalesce(pg_sequence_last_value('outbox.message_seq'::regclass), -1) AS seq, count(*) AS messages,
       (array_agg(DISTINCT m.topic))[:20] AS topics
  FROM outbox.unrouted_messages(%(above)s) AS m
