-- Does:  End a pause.
-- Takes: consumer, topic (each null: all), reason, person (null: the login)
-- Gives: whether that was done
-- Index: operation_pause_idx
SELECT outbox.resume(%(consumer)s, %(topic)s, %(reason)s, coalesce(%(person)s, session_user)) IS NOT NULL
