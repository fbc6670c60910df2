-- Does:  Read deliveries whose wait is over: those of given keys, in order, and those at given places. Locks nothing.
-- Takes: consumer; lanes, keys, aboves (same length: a lane, its key, the seq above which to continue); places: their seqs, moments, attempts (same length); max_rows_each (of a key), max_bytes
-- Gives: lane, seq, created_at, message_id, attempts, topic, key, tenant, payload (null: exceeds max_bytes), content_type, headers, schema_version, nothing
-- Index: redelivery_key_idx, redelivery_delivery_idx and ack_lane_idx, delivery_pkey of the partitions of the moments
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
                   FROM inbox.redelivery AS e
                  WHERE e.consumer = %(consumer)s
                    AND e.lane = freed.lane
                    AND e.key = freed.key
                    AND e.seq > freed.above
                    AND e.cause <> 'acked'
                    -- The last entry of each, if none says that it was acked.
                    AND (SELECT bool_or(later.cause = 'acked' OR later.entry > e.entry)
                           FROM inbox.redelivery AS later
                          WHERE later.seq = e.seq
                            AND later.created_at = e.created_at) IS NOT TRUE
                    -- Nor a mark: its ack was under way when the entry was written.
                    AND (SELECT true
                           FROM inbox.ack AS a
                          WHERE a.created_at = date_bin('15 minutes', e.created_at, '2000-01-01 00:00:00+00')
                            AND a.consumer = e.consumer
                            AND a.lane = e.lane
                            AND a.last_seq >= e.seq
                            AND a.last_seq < e.seq + 4096
                            AND a.first_seq <= e.seq
                            AND e.seq = ANY (a.seqs)
                            AND e.created_at = ANY (a.moments)
                          LIMIT 1) IS NULL
                  ORDER BY e.seq
                  LIMIT %(max_rows_each)s
             ) AS waiting
             UNION ALL
            SELECT * FROM unnest(%(seqs)s::bigint[], %(moments)s::timestamptz[], %(attempts)s::integer[])
        ) AS place (seq, created_at, attempts)
       CROSS JOIN LATERAL (
            SELECT *
              FROM inbox.delivery AS d
             WHERE d.seq = place.seq
               AND d.created_at = place.created_at
             LIMIT 1
       ) AS d
       WHERE d.consumer = %(consumer)s
  ) AS claimed
 ORDER BY lane, seq
