-- Does:  Record that a message waits for its long handler, unless it is already recorded.
-- Takes: id, at (of the id), consumer, topic, key, tenant, is_known (whether there is a receipt)
-- Gives: nothing
-- Index: job_pkey of one partition
INSERT INTO inbox.job (message_id, message_at, consumer, topic, key, tenant, state, finished_at)
VALUES (CAST(:id AS uuid), CAST(:at AS timestamptz), CAST(:consumer AS text),
        CAST(:topic AS text), CAST(:key AS text), CAST(:tenant AS text),
        CASE WHEN CAST(:is_known AS boolean) THEN 'skipped' ELSE 'queued' END,
        CASE WHEN CAST(:is_known AS boolean) THEN clock_timestamp() END)
ON CONFLICT DO NOTHING
