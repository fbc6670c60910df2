-- Does:  Find how far an examination of ready rows got before it stopped at max_examined rows of each lane.
-- Takes: lanes, starts and ends (same length), oldest and newest created_at, max_examined
-- Gives: lane, count, last seq (null if there is none)
-- Index: message_ready_idx
SELECT leased.lane, reach.count, reach.last
  FROM unnest(%(lanes)s::smallint[], %(starts)s::bigint[], %(ends)s::bigint[]) AS leased (lane, start, "end")
 CROSS JOIN LATERAL (
     SELECT count(*) AS count, max(examined.seq) AS last
       FROM (
           SELECT m.seq
             FROM outbox.message AS m
            WHERE m.lane = leased.lane
              AND m.seq > leased.start
              AND m.seq <= leased."end"
              AND m.created_at >= %(oldest)s
              AND m.created_at < %(newest)s
              AND m.available_at IS NULL
              AND m.published_at IS NULL
              AND m.dead_lettered_at IS NULL
            ORDER BY m.seq
            LIMIT %(max_examined)s
       ) AS examined
 ) AS reach
