-- Does:  Count the messages of lanes between two seqs, partition by partition, and find the first without a mark.
-- Takes: lanes, aboves and up_tos (seqs of lane n at place n + 1), above and up_to (the lowest and the highest of these)
-- Gives: lane, starts_at (of the partition; null: the default partition), messages, unmarked (the first seq; null: all are marked)
-- Index: message_lane_idx and settlement_lane_idx on every partition
-- It reads all lanes at once, so that a page with messages of many lanes is read only once: 1.0 µs of
-- processor time per message, instead of 2.6 µs to search and count lane by lane (1,000 bytes, 16 lanes).
SELECT counted.lane, partition.starts_at, counted.messages, counted.unmarked
  FROM (
      SELECT m.lane, m.tableoid AS partition, count(*) AS messages,
             min(m.seq) FILTER (
                 -- See claim_batch.sql.
                 WHERE m.id NOT IN (
                     SELECT unnest(ARRAY(
                         SELECT unnest(mark.ids)
                           FROM unnest(%(lanes)s::smallint[]) AS marked (lane)
                          CROSS JOIN LATERAL (
                              SELECT s.ids
                                FROM outbox.settlement AS s
                               WHERE s.lane = marked.lane
                                 AND s.last_seq > %(above)s
                                 AND s.last_seq < %(up_to)s::bigint + 4096
                                 AND s.first_seq <= %(up_to)s
                               ORDER BY s.last_seq) AS mark)))) AS unmarked
        FROM outbox.message AS m
       WHERE m.lane = ANY (%(lanes)s::smallint[])
         AND m.seq > %(above)s
         AND m.seq <= %(up_to)s
         AND m.seq > (%(aboves)s::bigint[])[m.lane + 1]
         AND m.seq <= (%(up_tos)s::bigint[])[m.lane + 1]
       GROUP BY m.lane, m.tableoid
  ) AS counted
  LEFT JOIN outbox.partitions('outbox.message') AS partition ON partition.partition = counted.partition
