-- Does:  Read when the current minute began.
-- Takes: nothing
-- Gives: that time
-- Index: none
SELECT date_trunc('minute', now())
