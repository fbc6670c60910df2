-- Does:  Make ready again what was published and names a message as its cause.
-- Takes: id (of the cause)
-- Gives: how many
-- Index: message_cause_idx of the partitions since the cause was made
SELECT outbox.replay_caused_by(CAST(:id AS uuid))
