-- Does:  Check whether the postgres broker is in use: whether there is any subscription or delivery.
-- Takes: nothing
-- Gives: true or false
-- Index: subscription_pkey; any one of inbox.delivery, the first row
SELECT EXISTS (SELECT FROM inbox.subscription) OR EXISTS (SELECT FROM inbox.delivery)
