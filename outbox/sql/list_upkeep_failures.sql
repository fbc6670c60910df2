-- Does:  List the steps that failed in the last upkeep.
-- Takes: nothing
-- Gives: failed_at, failure, remedy (null: unknown)
-- Index: none
SELECT failed_at, failure, remedy FROM outbox.upkeep_failure WHERE step <> 'clock' ORDER BY failed_at
