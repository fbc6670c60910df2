-- Does:  Part of each claim: which rows m of a leased lane its position doesn't cover.
-- Takes: base, oldest and newest created_at; part_lanes, part_oldest, part_newest, part_starts, part_up_tos, part_snapshots (of lanes with several parts)
-- Gives: a condition
-- Index: message_lane_idx on each partition between oldest and newest
m.lane = leased.lane
  AND m.seq > leased.start
  AND m.created_at >= %(oldest)s
  AND m.created_at < %(newest)s
  AND CASE WHEN leased.up_to IS NOT NULL
      THEN m.seq > leased.up_to
           OR m.seq > %(base)s AND NOT pg_visible_in_snapshot(m.xid, leased.snapshot)
      ELSE (SELECT true
              FROM unnest(%(part_lanes)s::smallint[], %(part_oldest)s::timestamptz[], %(part_newest)s::timestamptz[],
                          %(part_starts)s::bigint[], %(part_up_tos)s::bigint[], %(part_snapshots)s::text[])
                   AS part (lane, oldest, newest, start, up_to, snapshot)
             WHERE part.lane = m.lane
               AND m.created_at >= part.oldest
               AND m.created_at < part.newest
               AND (leased.as_of IS NULL OR m.seq > part.start)
               AND (m.seq > part.up_to
                    OR m.seq > %(base)s AND NOT pg_visible_in_snapshot(m.xid, part.snapshot::pg_snapshot)))
      END
  AND (leased.as_of IS NULL OR pg_visible_in_snapshot(m.xid, leased.as_of))
