-- Does:  Record an operation on dead letters that a person started.
-- Takes: kind, selection, reason, asked_by, expected
-- Gives: id
-- Index: none
INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected)
VALUES (%(kind)s, %(selection)s, %(reason)s, %(asked_by)s, %(expected)s)
RETURNING id
