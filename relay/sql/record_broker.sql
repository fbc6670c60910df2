-- Does:  Record the broker of a reader, if none is recorded or it is to be replaced.
-- Takes: reader, broker, switch (whether to replace another one)
-- Gives: nothing
-- Index: reader_pkey
UPDATE outbox.reader AS r
   SET broker = %(broker)s, broker_since = now()
 WHERE r.reader = %(reader)s
   AND (r.broker IS NULL OR %(switch)s AND r.broker <> %(broker)s)
