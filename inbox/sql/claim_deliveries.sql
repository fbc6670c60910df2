-- Does:  Read the next deliveries of leased lanes, bounded in rows and in bytes. Locks nothing.
-- Takes: consumer, lanes, floors (same length), passed (seqs above the floors to skip), oldest and newest created_at, max_rows, max_bytes
-- Gives: lane, seq, created_at, message_id, attempts (0), topic, key, tenant, payload, content_type, headers, schema_version, snapshot (xmin and age, in the first row)
-- Index: delivery_lane_idx on each partition between oldest and newest
SELECT lane, seq, created_at, message_id, 0 AS attempts, topic, key, tenant, payload, content_type, headers, schema_version,
       -- See outbox/postgres/lane_cursor.py.
       CASE WHEN bytes_before = 0
            THEN concat_ws(':', pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()),
                           pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid))
        END AS snapshot
  FROM (
      SELECT ready.*,
             -- In the order of the nested loop, lane by lane: no sort, and LIMIT can stop it.
             sum(ready.bytes) OVER (ROWS UNBOUNDED PRECEDING) - ready.bytes AS bytes_before
        FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[]) AS leased (lane, floor)
       CROSS JOIN LATERAL (
           SELECT d.lane, d.seq, d.created_at, d.message_id, d.topic, d.key, d.tenant,
                  d.payload, d.content_type, d.schema_version,
                  -- Most have none: a null costs the client nothing to decode.
                  nullif(d.headers, '{}'::jsonb)::text AS headers,
                  octet_length(d.payload) AS bytes
             FROM inbox.delivery AS d
            WHERE d.consumer = %(consumer)s
              AND d.lane = leased.lane
              AND d.seq > leased.floor
              AND d.created_at >= %(oldest)s
              AND d.created_at < %(newest)s
              -- Not <> ALL, for which the planner estimates each element. An array of an array, so that it
              -- expects few and hashes them, however many there are.
              AND d.seq NOT IN (SELECT unnest(ARRAY(SELECT unnest(%(passed)s::bigint[]))))
            ORDER BY d.seq
            LIMIT %(max_rows)s
       ) AS ready
  ) AS claimed
 WHERE bytes_before < %(max_bytes)s
 LIMIT %(max_rows)s
