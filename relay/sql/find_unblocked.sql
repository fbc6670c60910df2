-- Does:  Find the next messages of congested lanes that are not behind a refused one, among the first ready rows above the floor.
-- Takes: lanes, floors (same length), returning (keys that catch up), refused_since, oldest and newest created_at, aside (ids to leave out), max_examined (of each lane), max_rows
-- Gives: lane, seq
-- Index: message_ready_idx for the rows, message_blocked_idx for their heads
SELECT found.lane, found.seq
  FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[]) AS leased (lane, floor)
 CROSS JOIN LATERAL (
     SELECT leased.lane, examined.seq
       FROM (
           SELECT m.seq, m.key
             FROM outbox.message AS m
            WHERE m.lane = leased.lane
              AND m.seq > leased.floor
              AND m.created_at >= %(oldest)s
              AND m.created_at < %(newest)s
              AND m.available_at IS NULL
              AND m.published_at IS NULL
              AND m.dead_lettered_at IS NULL
              AND m.id <> ALL (%(aside)s::uuid[])
            ORDER BY m.seq
            LIMIT %(max_examined)s
       ) AS examined
      WHERE examined.key IS NULL
         OR (    examined.key <> ALL (%(returning)s::text[])
             AND NOT EXISTS (
                     SELECT
                       FROM outbox.message AS head
                      WHERE head.lane = leased.lane
                        AND head.key = examined.key
                        AND head.attempts > 0
                        AND head.published_at IS NULL
                        AND head.dead_lettered_at IS NULL
                        AND head.created_at >= %(refused_since)s
                        AND head.created_at < %(newest)s
                        -- A head that is due again goes first. Above the floor it is among the rows
                        -- examined here; below, it is still to be found.
                        AND (head.available_at IS NOT NULL AND head.seq <> examined.seq OR head.seq <= leased.floor)
                ))
      LIMIT %(max_rows)s
 ) AS found
 LIMIT %(max_rows)s
