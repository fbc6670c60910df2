-- Does:  Record that a message waits for its long handler, or that it was handled, unless it is already recorded.
-- Takes: id, at (of the id), consumer, topic, key, tenant
-- Gives: nothing
-- Index: job_pkey and receipt_pkey of one partition
INSERT INTO inbox.job (message_id, message_at, consumer, topic, key, tenant, state, finished_at)
SELECT new.id, new.at, new.consumer, CAST(:topic AS text), CAST(:key AS text), CAST(:tenant AS text),
       CASE WHEN receipt.is_known THEN 'skipped' ELSE 'queued' END,
       CASE WHEN receipt.is_known THEN clock_timestamp() END
  FROM (SELECT CAST(:id AS uuid), CAST(:at AS timestamptz), CAST(:consumer AS text)) AS new (id, at, consumer),
       LATERAL (SELECT EXISTS (SELECT
                                 FROM inbox.receipt AS r
                                WHERE r.message_id = new.id
                                  AND r.message_at = new.at
                                  AND r.consumer = new.consumer)) AS receipt (is_known)
ON CONFLICT DO NOTHING
