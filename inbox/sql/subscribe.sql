-- Does:  Subscribe a consumer of the postgres broker to topics; existing subscriptions stay.
-- Takes: consumer, topics
-- Gives: nothing
-- Index: subscription_pkey
INSERT INTO inbox.subscription (consumer, topic)
SELECT %(consumer)s, topic
  FROM pg_catalog.unnest(%(topics)s::text[]) AS wanted (topic)
    ON CONFLICT DO NOTHING
