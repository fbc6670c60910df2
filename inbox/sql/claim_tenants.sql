-- Does:  Read the first deliveries of tenants that a claim does not reach because other tenants' deliveries come first. Locks nothing.
-- Takes: consumer, base, after (a tenant), known (tenants to skip), lanes, up_tos (same length: above which to look), seqs and moments (of rows to skip), oldest and newest created_at, max_steps, max_read (of a tenant and lane), max_rows_each (of a tenant), max_rows, max_bytes
-- Gives: step (the tenant visited, in order), lane (null: nothing was found for it), seq, created_at, message_id, attempts (0), topic, key, tenant, payload, content_type, headers, schema_version, nothing
-- Index: message_tenant_idx on each partition between oldest and newest
WITH RECURSIVE walk (tenant, is_new) AS (
    SELECT %(after)s::text, false
     UNION ALL
    -- From tenant to tenant, one descent each. A known one is stepped over unread: it may have a million entries.
    -- So its name bounds the search; as a filter it would not end it.
    SELECT coalesce(next.tenant, known.tenant), next.tenant IS NOT NULL
      FROM walk
     CROSS JOIN LATERAL (SELECT min(k) AS tenant FROM unnest(%(known)s::text[]) AS k WHERE k > walk.tenant) AS known
      LEFT JOIN LATERAL (
          (SELECT d.tenant
             FROM inbox.message AS d
            WHERE d.tenant IS NOT NULL
              AND d.tenant > walk.tenant
              AND d.tenant < known.tenant
              AND d.created_at >= %(oldest)s
              AND d.created_at < %(newest)s
            ORDER BY d.tenant
            LIMIT 1)
            UNION ALL
          (SELECT d.tenant
             FROM inbox.message AS d
            WHERE known.tenant IS NULL
              AND d.tenant IS NOT NULL
              AND d.tenant > walk.tenant
              AND d.created_at >= %(oldest)s
              AND d.created_at < %(newest)s
            ORDER BY d.tenant
            LIMIT 1)
      ) AS next ON true
     WHERE coalesce(next.tenant, known.tenant) IS NOT NULL
), found AS (
    SELECT step.tenant AS step, ready.*
      FROM (SELECT * FROM walk LIMIT %(max_steps)s) AS step
      LEFT JOIN LATERAL (
          SELECT d.*
            FROM unnest(%(lanes)s::smallint[], %(up_tos)s::bigint[]) AS leased (lane, up_to)
           CROSS JOIN LATERAL (
               SELECT d.lane, d.seq, d.created_at, d.message_id, d.topic, d.key, d.tenant,
                      d.payload, d.content_type, d.headers, d.schema_version
                 FROM (
                     SELECT *
                       FROM inbox.message AS d
                      WHERE step.is_new
                        AND d.tenant IS NOT NULL
                        -- Rows and not columns, so that no index but this one has the order, whatever the
                        -- statistics say: by lane and seq alone, finding this tenant reads the whole backlog.
                        AND (d.tenant, d.lane, d.seq) > (step.tenant, leased.lane, leased.up_to)
                        AND (d.tenant, d.lane) <= (step.tenant, leased.lane)
                        AND d.created_at >= %(oldest)s
                        AND d.created_at < %(newest)s
                      ORDER BY d.tenant, d.lane, d.seq
                      LIMIT %(max_read)s
                 ) AS d
                WHERE EXISTS (SELECT FROM inbox.subscription AS s
                               WHERE s.consumer = %(consumer)s
                                 AND inbox.brings(s, d.topic, d.seq, d.xid, %(base)s))
                  AND (d.seq, d.created_at) NOT IN (
                      SELECT unnest(ARRAY(SELECT unnest(%(seqs)s::bigint[]))), unnest(ARRAY(SELECT unnest(%(moments)s::timestamptz[])))
                  )
                LIMIT %(max_rows_each)s
           ) AS d
           LIMIT %(max_rows_each)s
      ) AS ready ON true
)
SELECT step, lane, seq, created_at, message_id, 0 AS attempts, topic, key, tenant, payload, content_type,
       nullif(headers, '{}'::jsonb)::text AS headers, schema_version, NULL AS nothing
  FROM (
      SELECT found.*, sum(octet_length(payload)) OVER (ROWS UNBOUNDED PRECEDING) - octet_length(payload) AS bytes_before
        FROM found
  ) AS bounded
 WHERE bytes_before IS NULL OR bytes_before < %(max_bytes)s
 LIMIT %(max_rows)s
