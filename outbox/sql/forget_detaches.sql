-- Does:  Forget detaches by pillarbox maintain that did not happen, so that who detaches them now is none of ours.
-- Takes: nothing
-- Gives: nothing
-- Index: none
UPDATE outbox.retiring_partition r SET detach_by = NULL
 WHERE r.detach_by = 'pillarbox maintain'
   AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = to_regclass(r.partition) AND NOT i.inhdetachpending)
