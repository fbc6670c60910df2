-- Does:  Count the messages that were nacked and wait for their next attempt.
-- Takes: nothing
-- Gives: keys (the number blocked, for each reader), without_key (the number of messages without a key, which block nothing)
-- Index: see outbox.open_deferrals
SELECT count(DISTINCT (reader, key)) FILTER (WHERE key IS NOT NULL) AS keys, count(*) FILTER (WHERE key IS NULL) AS without_key
  FROM outbox.open_deferrals(only_refused => true)
