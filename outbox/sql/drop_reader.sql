-- Does:  Drop a reader: it gets no more messages, and holds no days.
-- Takes: reader
-- Gives: nothing
-- Index: subscription_pkey
UPDATE outbox.subscription
   SET ended_at = now()
 WHERE reader = %(reader)s
   AND ended_at IS NULL
