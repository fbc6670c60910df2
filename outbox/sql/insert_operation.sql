-- Does:  Record an operation on dead letters that a person asked for; it starts after a delay.
-- Takes: kind, selection, reason, asked_by, expected, delay
-- Gives: id
-- Index: none
INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected, starts_at)
VALUES (%(kind)s, %(selection)s, %(reason)s, %(asked_by)s, %(expected)s, now() + %(delay)s)
RETURNING id
