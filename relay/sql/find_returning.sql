-- Does:  Find messages of keys that catch up, among the ready rows that their lane has passed.
-- Takes: lanes, positions and floors (same length), returning (keys), readied (seqs without a refusal), refused_since, oldest and newest created_at, aside (ids to leave out), max_examined (of each lane), max_rows
-- Gives: lane, seq
-- Index: message_ready_idx for the rows, message_blocked_idx for their heads
SELECT found.lane, found.seq
  FROM unnest(%(lanes)s::smallint[], %(positions)s::bigint[], %(floors)s::bigint[]) AS leased (lane, position, floor)
 CROSS JOIN LATERAL (
     SELECT leased.lane, examined.seq
       FROM (
           SELECT m.seq, m.key
             FROM outbox.message AS m
            WHERE m.lane = leased.lane
              AND m.seq > leased.position
              AND m.seq <= leased.floor
              AND m.created_at >= %(oldest)s
              AND m.created_at < %(newest)s
              AND m.available_at IS NULL
              AND m.published_at IS NULL
              AND m.dead_lettered_at IS NULL
              AND m.id <> ALL (%(aside)s::uuid[])
            ORDER BY m.seq
            LIMIT %(max_examined)s
       ) AS examined
      WHERE (examined.seq = ANY (%(readied)s::bigint[]) OR examined.key = ANY (%(returning)s::text[]))
            -- Not behind a message that was refused again, nor behind one that was passed by.
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
                        AND (head.available_at IS NOT NULL AND head.seq <> examined.seq OR head.seq <= leased.position)
                )
      LIMIT %(max_rows)s
 ) AS found
 LIMIT %(max_rows)s
