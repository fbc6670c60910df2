-- Does:  Find scheduled messages that are due and cancelled, or that an open transaction may cancel.
-- Takes: ids, created_ats (same length): those of messages that are due
-- Gives: id, created_at
-- Index: deferral_message_idx on the partitions of these messages, in outbox.due_cause
SELECT due.id, due.created_at
  FROM unnest(%(ids)s::uuid[], %(created_ats)s::timestamptz[]) AS due (id, created_at)
 WHERE outbox.due_cause(due.id, due.created_at, 'scheduled') <> 'scheduled'
