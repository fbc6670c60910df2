-- Does:  Dead-letter messages in one statement: end their runs, and copy those that no other relay has ended.
-- Takes: reader, ids, created_ats, lanes, seqs, runs, keys, reasons, attempts (started so far; same length), by_hand (no scheduled retry), first and last of created_ats
-- Gives: nothing
-- Index: message_pkey on each partition between first and last, deferral_settled_idx for conflicts
WITH ended AS (
    INSERT INTO outbox.deferral (reader, id, created_at, lane, seq, run, attempts, cause, outcome, key, reason)
    SELECT %(reader)s, id, created_at, lane, seq, run, attempts, 'settled', 'dead_lettered', key, reason
      FROM unnest(%(ids)s::uuid[], %(created_ats)s::timestamptz[], %(lanes)s::smallint[], %(seqs)s::bigint[], %(runs)s::integer[],
                  %(keys)s::text[], %(reasons)s::text[], %(attempts)s::integer[])
           AS nacked (id, created_at, lane, seq, run, key, reason, attempts)
     -- A large message may be moved long after it was read, when a failover may have lost it.
     WHERE EXISTS (SELECT FROM outbox.message AS m
                    WHERE m.id = nacked.id
                      AND m.created_at = nacked.created_at
                      AND m.created_at BETWEEN %(first)s AND %(last)s)
        ON CONFLICT (id, run, reader, created_at) WHERE cause = 'settled' DO NOTHING
 RETURNING id, created_at, attempts, reason
)
INSERT INTO outbox.dead_letter
       (origin, message_id, topic, key, tenant, attempts, schema_version, priority,
        content_type, headers, payload, error_reason, retry_after)
SELECT 'relay:' || %(reader)s, m.id::text, topic, key, tenant, ended.attempts, schema_version,
       (ARRAY['realtime', 'default', 'bulk'])[m.lane / 16 + 1], content_type,
       headers, payload, ended.reason, CASE WHEN NOT %(by_hand)s::boolean THEN now() END
  FROM ended
  JOIN outbox.message AS m
    ON m.id = ended.id
   AND m.created_at = ended.created_at
   AND m.created_at BETWEEN %(first)s AND %(last)s
