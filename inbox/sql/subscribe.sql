-- Does:  Subscribe a consumer of the postgres broker to topics; existing subscriptions stay.
-- Takes: consumer, topics
-- Gives: topic of each subscription that it had before
-- Index: subscription_pkey
WITH added AS (
    INSERT INTO inbox.subscription (consumer, topic)
    SELECT %(consumer)s, topic
      FROM pg_catalog.unnest(%(topics)s::text[]) AS wanted (topic)
        ON CONFLICT DO NOTHING
)
SELECT s.topic
  FROM inbox.subscription AS s
 WHERE s.consumer = %(consumer)s
