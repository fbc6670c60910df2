-- Does:  Read the last settlement of lanes.
-- Takes: reader, lanes
-- Gives: lane, number, owner; no row for a lane that was never settled
-- Index: position_pkey on every partition
SELECT leased.lane, last.number, last.owner
  FROM unnest(%(lanes)s::smallint[]) AS leased (lane)
 CROSS JOIN LATERAL (
     SELECT p.number, p.owner
       FROM outbox.position AS p
      WHERE p.reader = %(reader)s
        AND p.lane = leased.lane
      ORDER BY p.number DESC
      LIMIT 1
 ) AS last
