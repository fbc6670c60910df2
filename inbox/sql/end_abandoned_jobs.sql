-- Does:  End jobs whose cancellation was requested and whose process is gone.
-- Takes: consumer
-- Gives: nothing
-- Index: job_open_idx
UPDATE inbox.job
   SET state = 'cancelled', finished_at = clock_timestamp(), lease_until = NULL
 WHERE consumer = CAST(:consumer AS text)
   AND finished_at IS NULL
   AND state = 'waiting'
   -- One that nobody began may still come: who gets it ends it.
   AND lease > 0
   AND (lease_until IS NULL OR lease_until < clock_timestamp())
