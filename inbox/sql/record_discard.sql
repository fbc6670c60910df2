-- Does:  Record a receipt for a message that must not be handled any more.
-- Takes: id, consumer
-- Gives: nothing
-- Index: receipt_pkey of one partition
INSERT INTO inbox.receipt (message_id, message_at, consumer)
VALUES (%(id)s, inbox.moment_of(%(id)s), %(consumer)s)
    ON CONFLICT DO NOTHING
