-- Does:  Find each lane's first message without a mark, in all partitions.
-- Takes: lanes, aboves and up_tos (seqs; same length)
-- Gives: lane, seq and created_at (null: all are marked), following (the next seq of the lane above up_to), snapshot (xmin and age)
-- Index: message_lane_idx and settlement_lane_idx on every partition
SELECT leased.lane, first.seq, first.created_at, following.seq,
       -- See outbox/postgres/lane_cursor.py.
       concat_ws(':', pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()),
                 pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid)) AS snapshot
  FROM unnest(%(lanes)s::smallint[], %(aboves)s::bigint[], %(up_tos)s::bigint[]) AS leased (lane, above, up_to)
  LEFT JOIN LATERAL (
      SELECT m.seq, m.created_at
        FROM outbox.message AS m
       WHERE m.lane = leased.lane
         AND m.seq > leased.above
         AND m.seq <= leased.up_to
         -- See claim_batch.sql.
         AND m.id NOT IN (
                 SELECT unnest(ARRAY(
                     SELECT unnest(mark.ids)
                       FROM unnest(%(lanes)s::smallint[], %(aboves)s::bigint[], %(up_tos)s::bigint[]) AS marked (lane, above, up_to)
                      CROSS JOIN LATERAL (
                          SELECT s.ids
                            FROM outbox.settlement AS s
                           WHERE s.lane = marked.lane
                             AND s.last_seq > marked.above
                             AND s.last_seq < marked.up_to + 4096
                             AND s.first_seq <= marked.up_to
                           ORDER BY s.last_seq) AS mark)))
       ORDER BY m.seq
       LIMIT 1
  ) AS first ON true
  LEFT JOIN LATERAL (
      SELECT m.seq
        FROM outbox.message AS m
       WHERE m.lane = leased.lane
         AND m.seq > leased.up_to
       ORDER BY m.seq
       LIMIT 1
  ) AS following ON true
