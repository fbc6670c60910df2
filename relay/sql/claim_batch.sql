-- Does:  Read the next messages of leased lanes, bounded in rows and in bytes. Locks nothing.
-- Takes: lanes, floors (same length), oldest and newest created_at, blocked keys, aside (ids to leave out), only (these seqs; null: all), max_rows, max_bytes, and in bytes: max_indexed (of topic and key), max_tenant, max_content_type, max_headers, max_payload, max_copied
-- Gives: lane, seq, id, created_at, attempts, topic, key, tenant, payload, content_type, headers, schema_version, too_large (the field that is over its limit), verdict (load, next: it is for the next claim, or, for what is too large, settle or aside), snapshot (in the first row)
-- Index: message_ready_idx on each partition between oldest and newest
SELECT lane, seq, id, created_at, attempts,
       -- Of a row that is not loaded only the beginning of the topic leaves the server.
       CASE WHEN verdict = 'load' THEN topic ELSE left(topic, 80) END AS topic,
       CASE WHEN verdict = 'load' THEN key END AS key,
       CASE WHEN verdict = 'load' THEN tenant END AS tenant,
       CASE WHEN verdict = 'load' THEN payload END AS payload,
       CASE WHEN verdict = 'load' THEN content_type END AS content_type,
       -- Most have none: a null costs the client nothing. Text, since the client decodes
       -- with care what someone may have inserted by hand.
       CASE WHEN verdict = 'load' THEN nullif(headers, '{}'::jsonb)::text END AS headers,
       schema_version, too_large, verdict,
       -- See outbox/postgres/lane_cursor.py.
       CASE WHEN bytes_through = bytes
            THEN concat_ws(':', pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()),
                           pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid))
        END AS snapshot
  FROM (
      SELECT weighed.*,
             CASE WHEN too_large IS NOT NULL AND bytes = 0 THEN 'aside'
                  WHEN too_large IS NOT NULL THEN 'settle'
                  -- One message always passes.
                  WHEN bytes_through <= %(max_bytes)s OR bytes_through = bytes THEN 'load'
                  ELSE 'next' END AS verdict
        FROM (
            SELECT judged.*,
                   -- In the order of the nested loop, lane by lane: no sort. What it keeps of a
                   -- large value is a pointer.
                   sum(bytes) OVER (ROWS UNBOUNDED PRECEDING) AS bytes_through
              FROM (
                  SELECT sized.*,
                         CASE WHEN too_large IS NULL
                              -- Parsed, small headers take several times their size.
                              THEN octet_length(payload) + octet_length(topic) + octet_length(content_type)
                                   + coalesce(octet_length(key), 0) + coalesce(octet_length(tenant), 0)
                                   + 8 * header_bytes
                              WHEN stored_bytes <= %(max_copied)s THEN stored_bytes
                              ELSE 0 END::integer AS bytes
                    FROM (
                        SELECT measured.*,
                               CASE WHEN octet_length(topic) > %(max_indexed)s THEN 'topic'
                                    WHEN octet_length(key) > %(max_indexed)s THEN 'key'
                                    WHEN octet_length(tenant) > %(max_tenant)s THEN 'tenant'
                                    WHEN octet_length(content_type) > %(max_content_type)s THEN 'content_type'
                                    WHEN header_bytes > %(max_headers)s THEN 'headers'
                                    WHEN octet_length(payload) > %(max_payload)s THEN 'payload' END AS too_large,
                               pg_column_size(topic)::bigint + pg_column_size(content_type) + pg_column_size(headers)
                               + pg_column_size(payload) + coalesce(pg_column_size(key), 0)
                               + coalesce(pg_column_size(tenant), 0) AS stored_bytes
                          FROM (
                              SELECT ready.*,
                                     -- All other sizes are known without reading the value. The value at
                                     -- the empty path is all of it, expanded and not walked through; but
                                     -- not if that alone would cost much.
                                     CASE WHEN pg_column_compression(headers) IS NULL
                                            OR pg_column_size(headers) > %(max_headers)s
                                          THEN pg_column_size(headers)
                                          ELSE pg_column_size(headers #> '{}'::text[]) END AS header_bytes
                                FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[]) AS leased (lane, floor)
                               CROSS JOIN LATERAL (
                                   SELECT m.lane, m.seq, m.id, m.created_at, m.attempts, m.topic, m.key, m.tenant,
                                          m.content_type, m.schema_version, m.headers, m.payload
                                     FROM outbox.message AS m
                                    WHERE m.lane = leased.lane
                                      AND m.seq > leased.floor
                                      AND m.created_at >= %(oldest)s
                                      AND m.created_at < %(newest)s
                                      AND m.available_at IS NULL
                                      AND m.published_at IS NULL
                                      AND m.dead_lettered_at IS NULL
                                      AND (m.key IS NULL OR m.key <> ALL (%(blocked)s::text[]))
                                      AND m.id <> ALL (%(aside)s::uuid[])
                                      AND (%(only)s::bigint[] IS NULL OR m.seq = ANY (%(only)s::bigint[]))
                                    ORDER BY m.seq
                                    LIMIT %(max_rows)s
                               ) AS ready
                               LIMIT %(max_rows)s
                          ) AS measured
                    ) AS sized
              ) AS judged
        ) AS weighed
  ) AS claimed
 WHERE bytes_through - bytes <= %(max_bytes)s
