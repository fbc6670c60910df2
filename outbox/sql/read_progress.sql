-- Does:  Read which lanes have positions and messages in the partitions from a moment on.
-- Takes: since (where a partition begins)
-- Gives: lane, has_position, has_messages
-- Index: position_seq_idx and message_lane_idx of these partitions
-- OFFSET 0 keeps one search for each lane: without statistics the planner may
-- prefer to read all messages once and to hash their lanes. The order makes it read
-- the index: a bitmap of a large backlog takes seconds.
SELECT l.lane::smallint,
       EXISTS (SELECT FROM outbox.reader AS r JOIN outbox.position AS p USING (reader) WHERE p.lane = l.lane AND p.created_at >= %(since)s OFFSET 0) AS has_position,
       EXISTS (SELECT FROM outbox.message AS m WHERE m.lane = l.lane AND m.created_at >= %(since)s ORDER BY m.seq OFFSET 0) AS has_messages
  FROM generate_series(0, 47) AS l (lane)
 ORDER BY l.lane
