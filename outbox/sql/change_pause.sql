-- Does:  Pause a consumer, a topic of it, or a topic of all; or end that pause.
-- Takes: kind (pause or resume), consumer, topic (each null: all), reason, person (null: the login)
-- Gives: whether that was done
-- Index: operation_pause_idx
SELECT CASE %(kind)s WHEN 'pause' THEN outbox.pause(%(consumer)s, %(topic)s, %(reason)s, coalesce(%(person)s, session_user))
                     ELSE outbox.resume(%(consumer)s, %(topic)s, %(reason)s, coalesce(%(person)s, session_user)) END IS NOT NULL
