-- Does:  List the deliveries of lanes that have an entry in the log, above a seq of each lane.
-- Takes: consumer, lanes, up_tos (same length)
-- Gives: lane, seq, created_at, beyond (null; else an entry that the sequence, which was set back, has not assigned since)
-- Index: deferral_pkey on each partition
SELECT leased.lane, e.seq, e.created_at, max(e.entry) FILTER (WHERE e.entry > drawn.entry) AS beyond
  FROM unnest(%(lanes)s::smallint[], %(up_tos)s::bigint[]) AS leased (lane, up_to)
 CROSS JOIN (SELECT coalesce(pg_sequence_last_value('inbox.deferral_entry_seq'::regclass), 0)) AS drawn (entry)
  JOIN inbox.deferral AS e
    ON e.consumer = %(consumer)s
   AND e.lane = leased.lane
   AND (e.seq > leased.up_to OR e.entry > drawn.entry)
 GROUP BY leased.lane, e.seq, e.created_at
