-- Does:  Find the readers that have read up to the partitions from a moment on, and the lanes with messages there.
-- Takes: readers, since (where a partition begins)
-- Gives: readers (with a position there in each of these lanes, of which there must be one), lanes
-- Index: position_pkey and message_lane_idx of these partitions
-- OFFSET 0 keeps one search for each lane: without statistics the planner may prefer to read all messages once and to
-- hash their lanes. The order makes it read the index: a bitmap of a large backlog takes seconds.
WITH lane AS MATERIALIZED (
    SELECT l.lane::smallint
      FROM generate_series(0, 47) AS l (lane)
     WHERE EXISTS (SELECT FROM outbox.message AS m WHERE m.lane = l.lane AND m.created_at >= %(since)s ORDER BY m.seq OFFSET 0)
)
SELECT ARRAY(SELECT r.reader
               FROM unnest(%(readers)s::text[]) AS r (reader)
              WHERE (SELECT bool_and(EXISTS (SELECT FROM outbox.position AS p
                                              WHERE p.reader = r.reader AND p.lane = l.lane AND p.created_at >= %(since)s OFFSET 0))
                       FROM lane AS l)) AS readers,
       ARRAY(SELECT l.lane FROM lane AS l) AS lanes
