-- Does:  Count messages that no reader gets.
-- Takes: nothing
-- Gives: messages, topics (up to 20)
-- Index: message_topic_idx of every partition; reads these messages, and all of a topic in days in which a reader of it began or ended
SELECT count(*) AS messages, (array_agg(DISTINCT m.topic))[:20] AS topics
  FROM outbox.unrouted_messages() AS m
