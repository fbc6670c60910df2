-- Does:  Discard detaches that pillarbox maintain has recorded but not done, so that a later detach counts as done by hand.
-- Takes: nothing
-- Gives: nothing
-- Index: none
WITH discarded AS (
    DELETE FROM outbox.retiring_partition r
     WHERE r.detach_by = 'pillarbox maintain'
       AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = to_regclass(r.partition) AND NOT i.inhdetachpending)
)
UPDATE outbox.upkeep SET detached_at = clock_timestamp()
