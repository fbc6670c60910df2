-- Does:  Let a new reader get the messages of topics that are added from now on.
-- Takes: reader, topics, discard (whether it is not to publish them), from_oldest (whether it gets those that are there, too)
-- Gives: nothing
-- Index: subscription_pkey
INSERT INTO outbox.subscription (reader, topic, is_discarded, since, since_seq)
SELECT %(reader)s, wanted.topic, %(discard)s,
       CASE WHEN %(from_oldest)s THEN '1:1:' ELSE pg_current_snapshot() END,
       -- Read after the snapshot was taken.
       CASE WHEN %(from_oldest)s THEN -1 ELSE coalesce(pg_sequence_last_value('outbox.message_seq'::regclass), -1) END
  FROM pg_catalog.unnest(%(topics)s::text[]) AS wanted (topic)
