-- Does:  Read the next messages of leased lanes, bounded in rows, in bytes, and in the rows that are read for them. Locks nothing.
-- Takes: those of leased.sql and uncovered.sql of outbox/log; reader, gets_all (whether the reader has got everything since it began), max_read (of each lane), max_rows, max_bytes, and max_payload (in bytes)
-- Gives: lane, seq, id, created_at, topic, key, tenant, payload, content_type, headers (text; null: none), schema_version, due_at (null: when it was created, or it is not due), verdict (null: loaded, scheduled: not due yet, other: not for this reader, only the last row read of its lane, next: left for the next claim, aside: its payload is too large), place (among the rows read, from 1), view (in the first row; see read_view.sql of outbox/log). Without a message one row, of nulls except for view
-- Index: message_lane_idx on each partition between oldest and newest
-- It reads the reader's topics itself: another process can add topics whenever it likes.
-- Oldest and newest are literals, so that the prepared plan is for their partitions only.
SELECT lane, seq, id, created_at,
       -- Of a row that is not loaded, only the beginning of the topic leaves the server.
       CASE WHEN loaded THEN topic ELSE left(topic, 80) END AS topic,
       CASE WHEN loaded OR early THEN key END AS key,
       CASE WHEN loaded THEN tenant END AS tenant,
       CASE WHEN loaded THEN payload END AS payload,
       CASE WHEN loaded THEN content_type END AS content_type,
       -- Most have none: a null costs the client nothing.
       CASE WHEN loaded AND headers <> '{}'::jsonb THEN headers::text END AS headers,
       schema_version,
       CASE WHEN NOT early AND available_at > created_at THEN available_at END AS due_at,
       CASE WHEN NOT loaded THEN
            CASE WHEN other THEN 'other' WHEN early THEN 'scheduled' WHEN bytes > 0 THEN 'next' ELSE 'aside' END END AS verdict,
       place,
       CASE WHEN bytes_through <> bytes THEN NULL
            ELSE concat_ws('/', pg_catalog.pg_current_snapshot()::text,
                           pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid),
                           coalesce(pg_catalog.pg_sequence_last_value('outbox.message_seq'::pg_catalog.regclass), -1),
                           pg_catalog.pg_relation_filenode('outbox.message_seq'::pg_catalog.regclass))
        END AS view
  FROM (SELECT) AS always
  LEFT JOIN (
      SELECT weighed.*,
             bytes > 0 AND bytes_through <= %(max_bytes)s AS loaded
        FROM (
            SELECT measured.*,
                   -- In the order of the nested loop, lane by lane: no sort. It keeps only a pointer
                   -- to a large value.
                   sum(bytes) OVER read AS bytes_through,
                   row_number() OVER read AS place,
                   lead(lane) OVER read IS DISTINCT FROM lane AS is_last
              FROM (
                  SELECT ready.*,
                         -- 0 if it is not loaded. One message always passes: none counts for more than the limit.
                         CASE WHEN early OR other THEN 0
                              WHEN octet_length(payload) <= %(max_payload)s
                              -- Small headers take several times their size once parsed.
                              THEN least(octet_length(payload) + text_bytes + 8 * header_bytes, %(max_bytes)s)::integer
                              ELSE 0 END AS bytes
                    FROM (
                        SELECT {leased}
                        OFFSET 0
                    ) AS leased
                   CROSS JOIN LATERAL (
                       SELECT m.lane, m.seq, m.id, m.created_at, m.topic, m.key, m.tenant,
                              m.content_type, m.schema_version, m.headers, m.payload, m.available_at,
                              coalesce(m.available_at > now(), false) AS early,
                              -- First the topics in whole or in part, which leaves few rows to the subscriptions.
                              CASE WHEN NOT %(gets_all)s
                                   THEN (m.topic ^@ ANY (ARRAY(SELECT rtrim(s.topic, '*') FROM outbox.subscription AS s WHERE s.reader = %(reader)s))
                                         AND EXISTS (SELECT FROM outbox.subscription AS s
                                                      WHERE s.reader = %(reader)s
                                                        AND outbox.brings(s, m.topic, m.seq, m.xid, %(base)s))) IS NOT TRUE END AS other,
                              octet_length(m.topic)::bigint + octet_length(m.content_type)
                              + coalesce(octet_length(m.key), 0) + coalesce(octet_length(m.tenant), 0) AS text_bytes,
                              -- All other sizes are known without reading the value. The value at
                              -- the empty path is the whole one, decompressed but not traversed.
                              CASE WHEN pg_column_compression(m.headers) IS NULL
                                   THEN pg_column_size(m.headers)
                                   ELSE pg_column_size(m.headers #> '{}'::text[]) END AS header_bytes
                         FROM outbox.message AS m
                        WHERE {uncovered}
                        ORDER BY m.seq
                        LIMIT %(max_read)s
                   ) AS ready
              ) AS measured
            WINDOW read AS (ROWS UNBOUNDED PRECEDING)
        ) AS weighed
       WHERE other IS NOT TRUE OR is_last
      -- Also so that whether a row is loaded isn't computed for each column.
       LIMIT %(max_rows)s
  ) AS claimed ON bytes_through - bytes <= %(max_bytes)s
