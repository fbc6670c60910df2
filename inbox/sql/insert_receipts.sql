-- Does:  Record the receipts of many messages.
-- Takes: ids and moments (arrays as text, in one order), consumer
-- Gives: message_id of those that were new
-- Index: receipt_pkey of the partitions of their days
INSERT INTO inbox.receipt (message_id, message_at, consumer)
SELECT id, moment, CAST(:consumer AS text)
  FROM unnest(CAST(CAST(:ids AS text) AS uuid[]), CAST(CAST(:moments AS text) AS timestamptz[])) AS r (id, moment)
ON CONFLICT DO NOTHING
RETURNING message_id
