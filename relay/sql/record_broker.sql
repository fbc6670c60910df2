-- Does:  Record the relays' broker, if none is recorded or it is to be replaced.
-- Takes: identity, switch (whether to replace another one)
-- Gives: nothing
-- Index: broker_pkey
INSERT INTO outbox.broker AS b (identity) VALUES (%(identity)s)
    ON CONFLICT (is_it) DO UPDATE SET identity = excluded.identity, since = now()
    WHERE %(switch)s AND b.identity <> excluded.identity
