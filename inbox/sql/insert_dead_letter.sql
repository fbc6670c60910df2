-- Does:  Write a dead letter, unless the message has a PENDING one.
-- Takes: origin, message_id, topic, key, tenant, attempts, schema_version, priority, content_type, headers (JSON as text), payload, error_reason, error_stacktrace, is_scheduled (false: no schedule retries it)
-- Gives: one row if it was written
-- Index: dead_letter_message_idx of each partition
INSERT INTO inbox.dead_letter (origin, message_id, topic, key, tenant, attempts, schema_version, priority, content_type,
                               headers, payload, error_reason, error_stacktrace, retry_after)
SELECT new.origin, new.message_id, CAST(:topic AS text), CAST(:key AS text), CAST(:tenant AS text),
       CAST(:attempts AS integer), CAST(:schema_version AS integer), CAST(:priority AS text), CAST(:content_type AS text),
       CAST(CAST(:headers AS text) AS jsonb), CAST(:payload AS bytea),
       CAST(:error_reason AS text), CAST(:error_stacktrace AS text),
       CASE WHEN CAST(:is_scheduled AS boolean) THEN now() END
  FROM (SELECT CAST(:origin AS text), CAST(:message_id AS text)) AS new (origin, message_id)
 WHERE NOT EXISTS (
       SELECT
         FROM inbox.dead_letter AS d
        WHERE d.status = 'PENDING'
          AND d.message_id = new.message_id
          AND d.origin = new.origin)
RETURNING 1
