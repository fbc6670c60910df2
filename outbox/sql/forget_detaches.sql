-- Does:  Clear detaches that pillarbox maintain has recorded but not done, so that a later detach counts as done by hand.
-- Takes: nothing
-- Gives: nothing
-- Index: none
UPDATE outbox.retiring_partition r SET detach_by = NULL
 WHERE r.detach_by = 'pillarbox maintain'
   AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = to_regclass(r.partition) AND NOT i.inhdetachpending)
