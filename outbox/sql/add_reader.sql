-- Does:  Add a reader of the outbox.
-- Takes: reader, broker (null: it discards its messages), role (null: none of its own)
-- Gives: reader; no row if it exists
-- Index: reader_pkey
INSERT INTO outbox.reader (reader, broker, broker_since, role)
VALUES (%(reader)s, %(broker)s::text, CASE WHEN %(broker)s::text IS NOT NULL THEN now() END,
        pg_get_userbyid(quote_ident(%(role)s)::regrole))
    ON CONFLICT DO NOTHING
RETURNING reader
