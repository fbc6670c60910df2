-- Does:  End subscriptions of a consumer of the postgres broker, also for what it has not claimed yet.
-- Takes: consumer, topics
-- Gives: topic of each removed subscription
-- Index: subscription_pkey
DELETE FROM inbox.subscription
 WHERE consumer = %(consumer)s
   AND topic = ANY (%(topics)s::text[])
RETURNING topic
