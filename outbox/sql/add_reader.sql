-- Does:  Add a reader of the outbox.
-- Takes: reader, broker (null: it discards its messages)
-- Gives: reader; no row if it exists
-- Index: reader_pkey
INSERT INTO outbox.reader (reader, broker, broker_since)
VALUES (%(reader)s, %(broker)s::text, CASE WHEN %(broker)s::text IS NOT NULL THEN now() END)
    ON CONFLICT DO NOTHING
RETURNING reader
