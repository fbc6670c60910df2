-- Does:  Make the published messages that a given message caused ready again.
-- Takes: id (of the cause)
-- Gives: their number
-- Index: message_cause_idx of the partitions since the cause was created
SELECT outbox.replay_caused_by(CAST(:id AS uuid))
