-- Does:  Report checks that a standby can't run, and where to run remedies.
-- Takes: nothing
-- Gives: severity, finding, remedy
-- Index: none
SELECT 'unknown',
       'this server is a standby: it doesn''t show pg_cron''s launcher, nor the sessions, locks and replication slots of its primary',
       'run pillarbox doctor on the primary as well, and every remedy there: a standby is read-only'
 WHERE pg_is_in_recovery()
