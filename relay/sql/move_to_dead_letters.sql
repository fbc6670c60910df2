-- Does:  Dead-letter messages in one statement: end their runs, and copy those that no other relay has ended.
-- Takes: ids, created_ats, lanes, seqs, runs, keys, reasons, attempts (started so far; same length), origin, by_hand (no scheduled retry), max_topic_bytes, topic_header (the header that keeps a longer topic), first and last of created_ats
-- Gives: nothing
-- Index: message_pkey and settlement_lane_idx on each partition between first and last, deferral_settled_idx for conflicts
WITH given_up AS (
    INSERT INTO outbox.deferral (id, created_at, lane, seq, run, attempts, cause, outcome, key, reason)
    SELECT id, created_at, lane, seq, run, attempts, 'settled', 'dead_lettered', key, reason
      FROM unnest(%(ids)s::uuid[], %(created_ats)s::timestamptz[], %(lanes)s::smallint[], %(seqs)s::bigint[], %(runs)s::integer[],
                  %(keys)s::text[], %(reasons)s::text[], %(attempts)s::integer[])
           AS nacked (id, created_at, lane, seq, run, key, reason, attempts)
     -- Another relay may have published it in the meantime.
     WHERE run > 0
        OR (SELECT true
              FROM outbox.settlement AS s
             WHERE s.lane = nacked.lane
               AND s.last_seq >= nacked.seq
               AND s.last_seq < nacked.seq + 4096
               AND s.first_seq <= nacked.seq
               AND s.outcome <> 'deferred'
               AND s.created_at = date_bin('15 minutes', nacked.created_at, '2000-01-01 00:00:00+00')
               AND s.created_at BETWEEN date_bin('15 minutes', %(first)s, '2000-01-01 00:00:00+00') AND %(last)s
               AND nacked.id = ANY (s.ids)
             LIMIT 1) IS NULL
        ON CONFLICT (id, run, created_at) WHERE cause = 'settled' DO NOTHING
 RETURNING id, created_at, attempts, reason
)
INSERT INTO outbox.dead_letter
       (origin, message_id, topic, key, tenant, attempts, schema_version,
        content_type, headers, payload, error_reason, retry_after)
SELECT %(origin)s, m.id::text,
       CASE WHEN long THEN left(topic, 200) || '…' ELSE topic END,
       key, tenant, given_up.attempts, schema_version, content_type,
       CASE WHEN NOT long THEN headers
            WHEN jsonb_typeof(headers) = 'object' THEN headers || jsonb_build_object(%(topic_header)s::text, topic)
            ELSE jsonb_build_object('headers', headers, %(topic_header)s::text, topic) END,
       payload, given_up.reason, CASE WHEN NOT %(by_hand)s::boolean THEN now() END
  FROM given_up
  JOIN outbox.message AS m
    ON m.id = given_up.id
   AND m.created_at = given_up.created_at
   AND m.created_at BETWEEN %(first)s AND %(last)s,
       -- A topic too long for the index can only have been inserted by hand.
       LATERAL (SELECT octet_length(topic) > %(max_topic_bytes)s) AS measured (long)
