-- Does:  Read the first messages of tenants that a claim does not reach because other tenants' messages come first. Locks nothing.
-- Takes: those of leased.sql and uncovered.sql of outbox/log; tops (of these lanes: above which to look); searched (JSON: by lane/tenant, a seq above which to look); reader and gets_all, as claim_batch.sql; after (a tenant), known (tenants to skip), seqs and moments (of messages to skip), max_steps, max_read (of a tenant and lane), max_rows_each (of a tenant), max_rows, and max_bytes
-- Gives: step (the tenant visited, in order), and the columns of claim_batch.sql (lane is null: nothing was found for it). At least one row, with the view
-- Index: message_tenant_idx, message_lane_idx and deferral_message_idx on each partition between oldest and newest
WITH RECURSIVE walk (tenant, is_new) AS (
    SELECT %(after)s::text, false
     UNION ALL
    -- From tenant to tenant, one descent of the index each. A known one is skipped unread: it may have a million entries.
    -- So its name is a bound of the search; as a filter, all its entries would be read.
    SELECT coalesce(next.tenant, known.tenant), next.tenant IS NOT NULL
      FROM walk
     CROSS JOIN LATERAL (SELECT min(k) AS tenant FROM unnest(%(known)s::text[]) AS k WHERE k > walk.tenant) AS known
      LEFT JOIN LATERAL (
          (SELECT m.tenant
             FROM outbox.message AS m
            WHERE m.tenant IS NOT NULL
              AND m.tenant > walk.tenant
              AND m.tenant < known.tenant
              AND m.created_at >= %(oldest)s
              AND m.created_at < %(newest)s
            ORDER BY m.tenant
            LIMIT 1)
            UNION ALL
          (SELECT m.tenant
             FROM outbox.message AS m
            WHERE known.tenant IS NULL
              AND m.tenant IS NOT NULL
              AND m.tenant > walk.tenant
              AND m.created_at >= %(oldest)s
              AND m.created_at < %(newest)s
            ORDER BY m.tenant
            LIMIT 1)
      ) AS next ON true
     WHERE coalesce(next.tenant, known.tenant) IS NOT NULL
), in_order AS MATERIALIZED (
    -- Not a lane with a row that committed late: the next claim reads that row first, since it may precede others of its key.
    SELECT leased.lane, top.seq AS top
      FROM (SELECT {leased}) AS leased
      JOIN unnest(%(lanes)s::smallint[], %(tops)s::bigint[]) AS top (lane, seq) ON top.lane = leased.lane
     WHERE (SELECT true
              FROM outbox.message AS m
             WHERE {uncovered}
               AND m.seq <= top.seq
             ORDER BY m.seq
             LIMIT 1) IS NULL
), found AS (
    SELECT step.tenant AS step, ready.*
      FROM (SELECT * FROM walk LIMIT %(max_steps)s) AS step
      LEFT JOIN LATERAL (
          SELECT m.*
            FROM in_order
           CROSS JOIN LATERAL (
               SELECT m.*
                 FROM (
                     SELECT *
                       FROM outbox.message AS m
                      WHERE step.is_new
                        AND m.tenant IS NOT NULL
                        -- Compared as a row, so that only this index has the order, whatever the
                        -- statistics say: by lane and seq alone, finding this tenant reads the whole backlog.
                        AND (m.tenant, m.lane, m.seq)
                            > (step.tenant, in_order.lane,
                               greatest(in_order.top, (%(searched)s::jsonb ->> (in_order.lane || '/' || step.tenant))::bigint))
                        AND (m.tenant, m.lane) <= (step.tenant, in_order.lane)
                        AND m.created_at >= %(oldest)s
                        AND m.created_at < %(newest)s
                      ORDER BY m.tenant, m.lane, m.seq
                      LIMIT %(max_read)s
                 ) AS m
                WHERE (%(gets_all)s
                       OR m.topic ^@ ANY (ARRAY(SELECT rtrim(s.topic, '*') FROM outbox.subscription AS s WHERE s.reader = %(reader)s))
                          AND EXISTS (SELECT FROM outbox.subscription AS s
                                       WHERE s.reader = %(reader)s
                                         AND outbox.brings(s, m.topic, m.seq, m.xid, %(base)s)))
                  AND (m.available_at > now()) IS NOT TRUE
                  AND (m.seq, m.created_at) NOT IN (
                      SELECT unnest(%(seqs)s::bigint[]), unnest(%(moments)s::timestamptz[])
                  )
                  AND (SELECT true
                         FROM outbox.deferral AS d
                        WHERE d.id = m.id
                          AND d.created_at = m.created_at
                          AND d.created_at >= %(oldest)s
                          AND d.created_at < %(newest)s
                          AND (d.reader = %(reader)s) IS TRUE
                        LIMIT 1) IS NULL
                LIMIT %(max_rows_each)s
           ) AS m
           LIMIT %(max_rows_each)s
      ) AS ready ON true
)
SELECT step, lane, seq, id, created_at, topic, key, tenant, payload, content_type,
       CASE WHEN headers <> '{}'::jsonb THEN headers::text END AS headers, schema_version,
       CASE WHEN available_at > created_at THEN available_at END AS due_at, NULL AS verdict, NULL AS place,
       concat_ws('/', pg_catalog.pg_current_snapshot()::text,
                 pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::pg_catalog.xid),
                 coalesce(pg_catalog.pg_sequence_last_value('outbox.message_seq'::pg_catalog.regclass), -1),
                 pg_catalog.pg_relation_filenode('outbox.message_seq'::pg_catalog.regclass)) AS view
  FROM (SELECT) AS always
  LEFT JOIN (
      SELECT found.*, sum(octet_length(payload)) OVER (ROWS UNBOUNDED PRECEDING) - octet_length(payload) AS bytes_before
        FROM found
  ) AS bounded ON bytes_before IS NULL OR bytes_before < %(max_bytes)s
 LIMIT %(max_rows)s
