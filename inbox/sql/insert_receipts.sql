-- Does:  Record the receipts of many messages, mark the transaction, and limit its idle time.
-- Takes: ids and moments (arrays as text, in the same order), consumer, max_idle (null: unchanged)
-- Gives: message_id of each new receipt
-- Index: receipt_pkey of the partitions of their days
INSERT INTO inbox.receipt (message_id, message_at, consumer)
SELECT id, moment, CAST(:consumer AS text)
  FROM unnest(CAST(CAST(:ids AS text) AS uuid[]), CAST(CAST(:moments AS text) AS timestamptz[])) AS r (id, moment)
 -- A subquery is evaluated once, not for each row.
 WHERE (SELECT set_config('idle_in_transaction_session_timeout',
                          coalesce(CAST(:max_idle AS text), current_setting('idle_in_transaction_session_timeout')),
                          true)
           || set_config('default_transaction_read_only', 'on', true)) IS NOT NULL
ON CONFLICT DO NOTHING
RETURNING message_id
