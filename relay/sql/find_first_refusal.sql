-- Does:  Find the first day with a refused, unsettled message: claims look for heads from that day on.
-- Takes: lanes, max_days (how far back to look day by day)
-- Gives: one row: first_day (null if there is none within max_days), lies_further_back (whether there is one before)
-- Index: message_blocked_idx
WITH days (day) AS (
    SELECT generate_series(date_trunc('day', now()) - make_interval(days => %(max_days)s::int),
                           date_trunc('day', now()) + interval '1 day', interval '1 day')
)
SELECT (SELECT min(refused.day)
          FROM days
         -- Not EXISTS, which the planner turns into a join that reads them all.
         CROSS JOIN LATERAL (
             SELECT days.day
               FROM outbox.message AS m
              WHERE m.lane = ANY (%(lanes)s::smallint[])
                AND m.key IS NOT NULL
                AND m.attempts > 0
                AND m.published_at IS NULL
                AND m.dead_lettered_at IS NULL
                AND m.created_at >= days.day
                AND m.created_at < days.day + interval '1 day'
              LIMIT 1
         ) AS refused) AS first_day,
       EXISTS (
           SELECT
             FROM outbox.message AS m
            WHERE m.lane = ANY (%(lanes)s::smallint[])
              AND m.key IS NOT NULL
              AND m.attempts > 0
              AND m.published_at IS NULL
              AND m.dead_lettered_at IS NULL
              AND m.created_at < date_trunc('day', now()) - make_interval(days => %(max_days)s::int)
       ) AS lies_further_back
