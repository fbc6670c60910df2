-- Does:  Limit each statement of this transaction, let none be compiled, which takes seconds with many partitions, keep stale statistics from making sequential scans look cheap, and give moments in UTC, since in a time zone that repeats an hour they can't be subtracted.
-- Takes: patience (with its unit), seqscan (on for a statement that reads a log anyway, else off)
-- Gives: nothing of use
-- Index: none
SELECT set_config('statement_timeout', %(patience)s, true), set_config('jit', 'off', true), set_config('enable_seqscan', %(seqscan)s, true), set_config('timezone', 'UTC', true)
