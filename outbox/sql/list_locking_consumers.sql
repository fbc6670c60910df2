-- Does:  List the consumers that may use locks: those of the postgres broker, and those with dead letters to retry.
-- Takes: nothing
-- Gives: consumer
-- Index: subscription_pkey, dead_letter_status_idx
SELECT consumer FROM inbox.subscription
UNION
SELECT substr(origin, length('consumer:') + 1) FROM inbox.dead_letter_status
 WHERE status = 'PENDING' AND starts_with(origin, 'consumer:')
 ORDER BY consumer
