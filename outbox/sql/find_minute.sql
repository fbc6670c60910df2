-- Does:  Tell when the current minute began.
-- Takes: nothing
-- Gives: that moment
-- Index: none
SELECT date_trunc('minute', now())
