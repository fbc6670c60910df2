-- Does:  Limit the time of each statement of this transaction; turn off compilation, which takes seconds with many partitions, and sequential scans and sorts, which stale statistics and a large backlog make look cheaper than reading an index up to a LIMIT; return moments in UTC, since those of a repeated hour can't be subtracted.
-- Takes: patience (with its unit), seqscan (on for a statement that reads a log anyway, else off)
-- Gives: nothing of use
-- Index: none
SELECT set_config('statement_timeout', %(patience)s, true), set_config('jit', 'off', true), set_config('enable_seqscan', %(seqscan)s, true), set_config('enable_sort', 'off', true), set_config('timezone', 'UTC', true)
