-- Does:  Read the next deliveries of leased lanes, bounded in rows, in bytes, and in the rows that are read for them. Locks nothing.
-- Takes: consumer, what leased.sql and uncovered.sql of outbox/log take; seqs and moments (of rows to skip), max_read (of each lane), max_rows, max_bytes
-- Gives: lane, seq, created_at, message_id, attempts (0), topic, key, tenant, payload, content_type, headers, schema_version, is_delivery (false: only the last row read of its lane), is_last (of its lane), place (among the rows read, from 1), view (in the first row; see read_view.sql of outbox/log). Without a row one of nulls except for view
-- Index: message_lane_idx on each partition between oldest and newest
SELECT lane, seq, created_at, message_id, 0 AS attempts, topic, key, tenant, CASE WHEN is_delivery THEN payload END AS payload,
       content_type, CASE WHEN is_delivery THEN headers::text END AS headers, schema_version, is_delivery, is_last, place,
       CASE WHEN bytes_before > 0 THEN NULL
            ELSE (SELECT concat_ws('/', pg_catalog.pg_current_snapshot()::text,
                                   pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid),
                                   coalesce(pg_catalog.pg_sequence_last_value('inbox.message_seq'::pg_catalog.regclass), -1),
                                   pg_catalog.pg_relation_filenode('inbox.message_seq'::pg_catalog.regclass)))
        END AS view
  FROM (SELECT) AS always
  LEFT JOIN (
      SELECT *
        FROM (
            SELECT m.*,
                   -- In the order of the nested loop, lane by lane: no sort, and LIMIT can stop it.
                   row_number() OVER read AS place,
                   lead(m.lane) OVER read IS DISTINCT FROM m.lane AS is_last,
                   sum(m.bytes) OVER read - m.bytes AS bytes_before
              FROM (
                  SELECT m.*, CASE WHEN is_delivery THEN octet_length(payload) ELSE 0 END AS bytes
                    FROM (
                        SELECT mine.*,
                               {leased},
                               (SELECT array_agg(s.topic) FILTER (WHERE right(s.topic, 1) <> '*') AS topics,
                                       array_agg(left(s.topic, -1)) FILTER (WHERE right(s.topic, 1) = '*') AS prefixes,
                                       max(s.since_seq) AS since_seq
                                  FROM inbox.subscription AS s
                                 WHERE s.consumer = %(consumer)s) AS mine
                        OFFSET 0
                    ) AS leased
                   CROSS JOIN LATERAL (
                       SELECT m.lane, m.seq, m.created_at, m.message_id, m.topic, m.key, m.tenant, m.payload, m.content_type,
                              m.schema_version,
                              -- Most have none: a null costs the client nothing to decode.
                              nullif(m.headers, '{}'::jsonb) AS headers,
                              ((m.topic = ANY (leased.topics) OR m.topic ^@ ANY (leased.prefixes))
                               AND (m.seq > leased.since_seq
                                    OR EXISTS (SELECT FROM inbox.subscription AS s
                                                WHERE s.consumer = %(consumer)s
                                                  AND inbox.brings(s, m.topic, m.seq, m.xid, %(base)s)))
                               -- Not <> ALL, for which the planner estimates each element.
                               AND (m.seq, m.created_at) NOT IN (SELECT * FROM unnest(%(seqs)s::bigint[], %(moments)s::timestamptz[]))
                              ) IS TRUE AS is_delivery
                         FROM inbox.message AS m
                        WHERE {uncovered}
                        ORDER BY m.seq
                        LIMIT %(max_read)s
                   ) AS m
              ) AS m
            WINDOW read AS (ROWS UNBOUNDED PRECEDING)
        ) AS placed
       WHERE is_delivery OR is_last
       LIMIT %(max_rows)s
  ) AS claimed ON bytes_before < %(max_bytes)s
