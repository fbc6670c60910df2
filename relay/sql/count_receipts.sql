-- Does:  Count the messages that a consumer has receipts for.
-- Takes: ids, consumer (its name, or that of the reader of one of its queues)
-- Gives: receipts
-- Index: receipt_pkey of each partition
SELECT count(DISTINCT message_id) AS receipts
  FROM inbox.receipt
 WHERE message_id = ANY (%(ids)s::uuid[]) AND consumer IN (%(consumer)s, split_part(%(consumer)s, '--', 1))
