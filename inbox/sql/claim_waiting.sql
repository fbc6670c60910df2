-- Does:  Read deliveries whose wait is over: those of given keys, in order, and those at given places. Locks nothing.
-- Takes: consumer, base; lanes, keys, aboves (same length: a lane, its key, the seq above which to continue); places: their seqs, moments (same length); max_rows_each (of a key), max_bytes
-- Gives: lane, seq, created_at, message_id, attempts, topic, key, tenant, payload (null: exceeds max_bytes), content_type, headers, schema_version, nothing
-- Index: deferral_key_idx and deferral_delivery_idx, message_pkey of the partitions of the moments
SELECT lane, seq, created_at, message_id, attempts, topic, key, tenant,
       CASE WHEN bytes_before < %(max_bytes)s THEN payload END AS payload,
       content_type, nullif(headers, '{}'::jsonb)::text AS headers, schema_version, NULL AS nothing
  FROM (
      SELECT d.lane, d.seq, d.created_at, d.message_id, place.attempts, d.topic, d.key, d.tenant, d.payload, d.content_type,
             d.headers, d.schema_version,
             sum(octet_length(d.payload)) OVER (ORDER BY d.lane, d.seq ROWS UNBOUNDED PRECEDING)
             - octet_length(d.payload) AS bytes_before
        FROM (
            SELECT waiting.seq, waiting.created_at, waiting.attempts
              FROM unnest(%(lanes)s::smallint[], %(keys)s::text[], %(aboves)s::bigint[]) AS freed (lane, key, above)
             CROSS JOIN LATERAL (
                 SELECT e.seq, e.created_at, e.attempts
                   FROM inbox.deferral AS e
                  WHERE e.consumer = %(consumer)s
                    AND e.lane = freed.lane
                    AND e.key = freed.key
                    AND e.seq > freed.above
                    AND e.cause <> 'acked'
                    -- The last entry of each, if none says that it was acked.
                    AND (SELECT bool_or(later.cause = 'acked' OR later.entry > e.entry)
                           FROM inbox.deferral AS later
                          WHERE later.seq = e.seq
                            AND later.created_at = e.created_at
                          AND (later.consumer = e.consumer) IS TRUE) IS NOT TRUE
                  ORDER BY e.seq
                  LIMIT %(max_rows_each)s
             ) AS waiting
             UNION ALL
            SELECT alone.seq, alone.created_at,
                   (SELECT last.attempts
                      FROM inbox.deferral AS last
                     WHERE last.seq = alone.seq
                       AND last.created_at = alone.created_at
                       AND last.cause <> 'acked'
                       AND (last.consumer = %(consumer)s) IS TRUE
                     ORDER BY last.entry DESC
                     LIMIT 1)
              FROM unnest(%(seqs)s::bigint[], %(moments)s::timestamptz[]) AS alone (seq, created_at)
        ) AS place (seq, created_at, attempts)
       CROSS JOIN LATERAL (
            SELECT *
              FROM inbox.message AS d
             WHERE d.seq = place.seq
               AND d.created_at = place.created_at
             LIMIT 1
       ) AS d
       WHERE EXISTS (SELECT FROM inbox.subscription AS s
                      WHERE s.consumer = %(consumer)s
                        AND inbox.brings(s, d.topic, d.seq, d.xid, %(base)s))
  ) AS claimed
 ORDER BY lane, seq
