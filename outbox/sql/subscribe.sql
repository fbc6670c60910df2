-- Does:  Let a reader get topics from now on, and add it if there is none.
-- Takes: reader, topics (null: all, of a new reader), broker (null: as it is), discard (whether they are not to be published), from_oldest (whether it also gets existing messages), role (of a new reader; null: none of its own)
-- Gives: whether topics were added; then repeat it in another transaction with topics '{}', and they begin
-- Index: reader_pkey, subscription_pkey
SELECT outbox.subscribe(%(reader)s, %(topics)s, %(broker)s, %(discard)s, %(from_oldest)s,
                        pg_get_userbyid(quote_ident(%(role)s)::regrole))
