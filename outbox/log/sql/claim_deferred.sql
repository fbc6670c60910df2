-- Does:  Read messages from the log, bounded in bytes. Locks nothing.
-- Takes: reader, ids, created_ats, lanes, seqs, runs, entries (the last known ones; same length), first and last of created_ats, max_bytes, and max_payload (in bytes)
-- Gives: the columns of claim_batch.sql, in the order of ids; due_at (the first in this run; null: when it was created), verdict (null: loaded, next: left for the next claim, aside: its payload is too large, gone: a later entry exists, missing: the message does not exist)
-- Index: message_pkey and deferral_message_idx on each partition between first and last
-- This resembles claim_batch.sql; see its comments.
SELECT lane, seq, id, created_at,
       CASE WHEN loaded THEN topic ELSE left(topic, 80) END AS topic,
       CASE WHEN loaded THEN key END AS key,
       CASE WHEN loaded THEN tenant END AS tenant,
       CASE WHEN loaded THEN payload END AS payload,
       CASE WHEN loaded THEN content_type END AS content_type,
       CASE WHEN loaded AND headers <> '{}'::jsonb THEN headers::text END AS headers,
       schema_version,
       CASE WHEN loaded THEN due_at END AS due_at,
       CASE WHEN NOT loaded THEN
            CASE WHEN topic IS NULL THEN 'missing' WHEN is_gone THEN 'gone'
                 WHEN bytes > 0 THEN 'next' ELSE 'aside' END END AS verdict,
       NULL AS place, NULL AS view
  FROM (
      SELECT weighed.*,
             bytes > 0 AND is_gone IS NULL
             AND (bytes_through <= %(max_bytes)s OR bytes_through = bytes) AS loaded
        FROM (
            SELECT measured.*,
                   sum(bytes) OVER (ORDER BY position ROWS UNBOUNDED PRECEDING) AS bytes_through
              FROM (
                  SELECT found.*,
                         CASE WHEN topic IS NULL OR is_gone THEN 0
                              WHEN octet_length(payload) <= %(max_payload)s
                              THEN (octet_length(payload) + text_bytes + 8 * header_bytes)::integer
                              ELSE 0 END AS bytes
                    FROM (
                        SELECT waiting.position, waiting.lane, waiting.seq, waiting.id, waiting.created_at,
                               m.topic, m.key, m.tenant, m.content_type, m.schema_version, m.headers, m.payload,
                               octet_length(m.topic)::bigint + octet_length(m.content_type)
                               + coalesce(octet_length(m.key), 0) + coalesce(octet_length(m.tenant), 0) AS text_bytes,
                               CASE WHEN pg_column_compression(m.headers) IS NULL
                                    THEN pg_column_size(m.headers)
                                    ELSE pg_column_size(m.headers #> '{}'::text[]) END AS header_bytes,
                               CASE WHEN waiting.run > 0 THEN
                                    (SELECT replay.due_at
                                       FROM outbox.deferral AS replay
                                      WHERE replay.id = waiting.id
                                        AND replay.run = waiting.run
                                        AND replay.created_at = waiting.created_at
                                        AND replay.created_at BETWEEN %(first)s AND %(last)s
                                        AND replay.cause = 'replayed'
                                        AND (replay.reader = %(reader)s) IS TRUE
                                      LIMIT 1)
                                    WHEN m.available_at > m.created_at THEN least(m.available_at, now()) END AS due_at,
                               (SELECT true
                                  FROM outbox.deferral AS later
                                 WHERE later.id = waiting.id
                                   AND later.created_at = waiting.created_at
                                   AND later.created_at BETWEEN %(first)s AND %(last)s
                                   AND (later.reader = %(reader)s) IS TRUE
                                   AND (   later.run > waiting.run
                                        OR later.run = waiting.run
                                       AND (later.entry > waiting.entry OR later.cause = 'settled'))
                                 LIMIT 1) AS is_gone
                          FROM unnest(%(ids)s::uuid[], %(created_ats)s::timestamptz[], %(lanes)s::smallint[], %(seqs)s::bigint[],
                                      %(runs)s::integer[], %(entries)s::bigint[])
                               WITH ORDINALITY AS waiting (id, created_at, lane, seq, run, entry, position)
                          LEFT JOIN LATERAL (
                              SELECT row.*
                                FROM outbox.message AS row
                               WHERE row.id = waiting.id
                                 AND row.created_at = waiting.created_at
                                 AND row.created_at BETWEEN %(first)s AND %(last)s
                               LIMIT 1
                          ) AS m ON true
                        OFFSET 0 -- or is_gone would be evaluated wherever it is used
                    ) AS found
              ) AS measured
        ) AS weighed
      OFFSET 0
  ) AS claimed
 WHERE bytes_through - bytes <= %(max_bytes)s
 ORDER BY position
