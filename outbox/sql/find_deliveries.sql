-- Does:  Check whether the postgres broker is in use: whether there is any subscription.
-- Takes: nothing
-- Gives: true or false
-- Index: subscription_pkey
SELECT EXISTS (SELECT FROM inbox.subscription)
