-- Does:  List the deliveries of lanes that have a mark or wait, above the floor of each lane.
-- Takes: consumer, lanes, floors (same length), oldest (start of a partition)
-- Gives: lane, seq
-- Index: ack_lane_idx and redelivery_pkey on each partition from oldest on
SELECT leased.lane, covered.seq
  FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[]) AS leased (lane, floor)
 CROSS JOIN LATERAL (
      SELECT marked.seq
        FROM inbox.ack AS a
       CROSS JOIN LATERAL unnest(a.seqs) AS marked (seq)
       WHERE a.consumer = %(consumer)s
         AND a.lane = leased.lane
         AND a.last_seq > leased.floor
         AND a.created_at >= %(oldest)s
       UNION ALL
      SELECT e.seq
        FROM inbox.redelivery AS e
       WHERE e.consumer = %(consumer)s
         AND e.lane = leased.lane
         AND e.created_at >= %(oldest)s
 ) AS covered
 WHERE covered.seq > leased.floor
