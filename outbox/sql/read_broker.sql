-- Does:  Read where the relays of a reader publish.
-- Takes: reader
-- Gives: broker (null until its first relay has recorded it)
-- Index: reader_pkey
SELECT broker FROM outbox.reader WHERE reader = %(reader)s
