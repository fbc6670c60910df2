-- Does:  Read the next messages of leased lanes, bounded in rows and in bytes. Locks nothing.
-- Takes: lanes, floors (same length), oldest (rounded down to 15 minutes) and newest created_at, aside (ids to leave out), max_rows, max_bytes, and in bytes: max_indexed (of topic and key), max_tenant, max_content_type, max_headers, max_payload, max_copied
-- Gives: lane, seq, id, created_at, topic, key, tenant, payload, content_type, headers (text; 'null': they aren't strings), schema_version, due_at (null: when it was created), verdict (null: loaded, scheduled: not due yet, next: left for the next claim, settle or aside: too large), too_large (the field that exceeds its limit), snapshot (in the first row)
-- Index: message_lane_idx and settlement_lane_idx on each partition between oldest and newest
-- Every claim plans this again, and planning time grows with the length of the statement. So the
-- expressions needed only for rows that are not loaded come last, and the levels repeat little.
SELECT lane, seq, id, created_at,
       -- Of a row that is not loaded, only the beginning of the topic leaves the server.
       CASE WHEN loaded THEN topic ELSE left(topic, 80) END AS topic,
       CASE WHEN loaded OR early AND octet_length(key) <= %(max_indexed)s THEN key END AS key,
       CASE WHEN loaded THEN tenant END AS tenant,
       CASE WHEN loaded THEN payload END AS payload,
       CASE WHEN loaded THEN content_type END AS content_type,
       -- Most have none: a null costs the client nothing. As text, so that the client can handle
       -- values that it can't decode, in rows inserted by hand. Only strings become text: a number of
       -- a few bytes can be 131 kB of it. Null, and not false, if it is no object.
       CASE WHEN loaded AND headers <> '{}'::jsonb
            THEN CASE WHEN (headers @? 'strict $.* ? (@.type() <> "string")') IS FALSE
                      THEN headers::text ELSE 'null' END END AS headers,
       schema_version,
       CASE WHEN loaded AND available_at > created_at THEN available_at END AS due_at,
       CASE WHEN NOT loaded THEN
            CASE WHEN early THEN 'scheduled' WHEN bytes > 0 THEN 'next'
                 WHEN bytes < 0 THEN 'settle' ELSE 'aside' END END AS verdict,
       CASE WHEN NOT loaded THEN
            CASE WHEN octet_length(topic) > %(max_indexed)s THEN 'topic'
                 WHEN octet_length(key) > %(max_indexed)s THEN 'key'
                 WHEN octet_length(tenant) > %(max_tenant)s THEN 'tenant'
                 WHEN octet_length(content_type) > %(max_content_type)s THEN 'content_type'
                 WHEN header_bytes > %(max_headers)s THEN 'headers'
                 WHEN octet_length(payload) > %(max_payload)s THEN 'payload' END END AS too_large,
       -- See outbox/postgres/lane_cursor.py.
       CASE WHEN bytes_through = abs(bytes)
            THEN concat_ws(':', pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()),
                           pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid))
        END AS snapshot
  FROM (
      SELECT weighed.*,
             -- One message always passes.
             bytes > 0 AND NOT early AND (bytes_through <= %(max_bytes)s OR bytes_through = bytes) AS loaded
        FROM (
            SELECT measured.*,
                   -- In the order of the nested loop, lane by lane: no sort. It keeps only a pointer
                   -- to a large value.
                   sum(abs(bytes)) OVER (ROWS UNBOUNDED PRECEDING) AS bytes_through
              FROM (
                  SELECT ready.*,
                         -- Of what is too large: negative if it can be moved with the batch, else 0.
                         CASE WHEN early THEN 0
                              WHEN header_bytes <= %(max_headers)s
                               AND octet_length(payload) <= %(max_payload)s
                               -- If they are short in total, each of them is.
                               AND (text_bytes <= least(%(max_indexed)s, %(max_tenant)s, %(max_content_type)s)
                                    OR octet_length(topic) <= %(max_indexed)s
                                       AND octet_length(content_type) <= %(max_content_type)s
                                       AND coalesce(octet_length(key), 0) <= %(max_indexed)s
                                       AND coalesce(octet_length(tenant), 0) <= %(max_tenant)s)
                              -- Small headers take several times their size once parsed.
                              THEN (octet_length(payload) + text_bytes + 8 * header_bytes)::integer
                              WHEN text_bytes + header_bytes + pg_column_size(payload) <= %(max_copied)s
                              THEN - (text_bytes + header_bytes + pg_column_size(payload))::integer
                              ELSE 0 END AS bytes
                    FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[]) AS leased (lane, floor)
                   CROSS JOIN LATERAL (
                       SELECT m.lane, m.seq, m.id, m.created_at, m.topic, m.key, m.tenant,
                              m.content_type, m.schema_version, m.headers, m.payload, m.available_at,
                              coalesce(m.available_at > now(), false) AS early,
                              octet_length(m.topic)::bigint + octet_length(m.content_type)
                              + coalesce(octet_length(m.key), 0) + coalesce(octet_length(m.tenant), 0) AS text_bytes,
                              -- All other sizes are known without reading the value. The value at
                              -- the empty path is the whole one, decompressed but not traversed.
                              -- Where decompressing alone would be expensive, the size is the most
                              -- that it can be.
                              CASE WHEN pg_column_compression(m.headers) IS NULL
                                   THEN pg_column_size(m.headers)
                                   WHEN pg_column_size(m.headers) > %(max_headers)s
                                   THEN 100::bigint * pg_column_size(m.headers)
                                   ELSE pg_column_size(m.headers #> '{}'::text[]) END AS header_bytes
                         FROM outbox.message AS m
                        WHERE m.lane = leased.lane
                          AND m.seq > leased.floor
                          AND m.created_at >= %(oldest)s
                          AND m.created_at < %(newest)s
                          -- One hash table of what has a mark above the floors, for all lanes. The
                          -- array hides from the planner how many there are: expecting too many
                          -- for a hash table, it would search the list for each row.
                          AND m.id NOT IN (
                                  SELECT unnest(ARRAY(
                                      SELECT unnest(mark.ids)
                                        FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[]) AS marked (lane, floor)
                                       CROSS JOIN LATERAL (
                                           SELECT s.ids
                                             FROM outbox.settlement AS s
                                            WHERE s.lane = marked.lane
                                              AND s.last_seq > marked.floor
                                              AND s.created_at >= %(oldest)s
                                              AND s.created_at < %(newest)s
                                            -- By the index: how few there are is not in the statistics.
                                            ORDER BY s.last_seq) AS mark)))
                          AND m.id <> ALL (%(aside)s::uuid[])
                        ORDER BY m.seq
                        LIMIT %(max_rows)s
                   ) AS ready
                   LIMIT %(max_rows)s
              ) AS measured
        ) AS weighed
      -- Without it, whether a row is loaded would be computed for each column.
      OFFSET 0
  ) AS claimed
 WHERE bytes_through - abs(bytes) <= %(max_bytes)s
