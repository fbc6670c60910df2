-- Does:  List the consumers of the postgres broker, each of which has its own lock class.
-- Takes: nothing
-- Gives: consumer
-- Index: subscription_pkey
SELECT DISTINCT consumer FROM inbox.subscription ORDER BY consumer
