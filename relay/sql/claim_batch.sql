-- Does:  Read the next messages of leased lanes, bounded in rows and in bytes. Locks nothing.
-- Takes: lanes, floors (same length), oldest and newest created_at, blocked keys, max_rows, max_bytes, max_payload
-- Gives: lane, seq, id, created_at, attempts, topic, key, tenant, payload, content_type, headers, schema_version, snapshot (in the first row)
-- Index: message_ready_idx on each partition between oldest and newest
SELECT lane, seq, id, created_at, attempts, topic, key, tenant, payload, content_type, headers, schema_version,
       CASE WHEN bytes_before = 0 THEN pg_catalog.pg_current_snapshot()::text END AS snapshot
  FROM (
      SELECT ready.*,
             -- In the order of the nested loop, lane by lane: no sort, and LIMIT can stop it.
             sum(ready.bytes) OVER (ROWS UNBOUNDED PRECEDING) - ready.bytes AS bytes_before
        FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[]) AS leased (lane, floor)
       CROSS JOIN LATERAL (
           SELECT m.lane, m.seq, m.id, m.created_at, m.attempts, m.topic, m.key, m.tenant,
                  m.content_type, m.schema_version,
                  -- Most have none: a null costs the client nothing. Text, since the client decodes
                  -- with care what someone may have inserted by hand.
                  nullif(m.headers, '{}'::jsonb)::text AS headers,
                  CASE WHEN octet_length(m.payload) <= %(max_payload)s THEN m.payload END AS payload,
                  octet_length(m.payload) AS bytes
             FROM outbox.message AS m
            WHERE m.lane = leased.lane
              AND m.seq > leased.floor
              AND m.created_at >= %(oldest)s
              AND m.created_at < %(newest)s
              AND m.available_at IS NULL
              AND m.published_at IS NULL
              AND m.dead_lettered_at IS NULL
              AND (m.key IS NULL OR m.key <> ALL (%(blocked)s::text[]))
            ORDER BY m.seq
            LIMIT %(max_rows)s
       ) AS ready
  ) AS claimed
 WHERE bytes_before < %(max_bytes)s
 LIMIT %(max_rows)s
