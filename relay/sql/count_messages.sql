-- Does:  Count all messages, settled or not, up to a number.
-- Takes: most
-- Gives: messages (up to most), is_complete (whether there are no more), oldest (when the oldest one was added)
-- Index: message_lane_idx of each partition up to the first one with messages
SELECT least(counted.messages, %(most)s) AS messages, counted.messages <= %(most)s AS is_complete, first.created_at AS oldest
  FROM (SELECT count(*) FROM (SELECT FROM outbox.message LIMIT %(most)s + 1) AS m) AS counted (messages)
  LEFT JOIN LATERAL (
       SELECT min(m.created_at)
         FROM outbox.partitions('outbox.message') AS d
        CROSS JOIN LATERAL (
              SELECT min(f.created_at)
                FROM generate_series(0, 47) AS l (lane)
               CROSS JOIN LATERAL (SELECT q.created_at FROM outbox.message AS q
                                    WHERE q.lane = l.lane AND q.created_at >= d.starts_at AND q.created_at < d.ends_at
                                    ORDER BY q.seq LIMIT 1) AS f
              ) AS m (created_at)
        WHERE m.created_at IS NOT NULL
       ) AS first (created_at) ON true
