-- Does:  List the deliveries of lanes that have an entry in the log, above a seq of each lane.
-- Takes: consumer, lanes, up_tos (same length)
-- Gives: lane, seq, created_at
-- Index: deferral_pkey on each partition
SELECT DISTINCT leased.lane, e.seq, e.created_at
  FROM unnest(%(lanes)s::smallint[], %(up_tos)s::bigint[]) AS leased (lane, up_to)
  JOIN inbox.deferral AS e
    ON e.consumer = %(consumer)s
   AND e.lane = leased.lane
   AND e.seq > leased.up_to
