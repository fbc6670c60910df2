-- Does:  Store the failed attempts and the last error of messages; none of these attempts killed its process.
-- Takes: ids, moments, starts, reasons and stacktraces (arrays as text, in the same order), consumer
-- Gives: nothing
-- Index: suspect_pkey of the partitions of their days
INSERT INTO inbox.suspect AS s (message_id, message_at, consumer, starts, is_open, error_reason, error_stacktrace)
SELECT id, moment, CAST(:consumer AS text), starts, false, nullif(reason, ''), nullif(stacktrace, '')
  FROM unnest(CAST(CAST(:ids AS text) AS uuid[]), CAST(CAST(:moments AS text) AS timestamptz[]),
              CAST(CAST(:starts AS text) AS integer[]), CAST(CAST(:reasons AS text) AS text[]),
              CAST(CAST(:stacktraces AS text) AS text[])) AS r (id, moment, starts, reason, stacktrace)
ON CONFLICT (message_id, consumer, message_at) DO UPDATE
   SET starts = greatest(s.starts, EXCLUDED.starts),
       is_open = false,
       error_reason = EXCLUDED.error_reason,
       error_stacktrace = EXCLUDED.error_stacktrace
