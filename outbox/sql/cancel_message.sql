-- Does:  Cancel a scheduled message, unless it is due.
-- Takes: id, reason (null: none)
-- Gives: outcome, readers (if it is too late: the state at each)
-- Index: message_pkey and deferral_message_idx of the days around the moment in the id
SELECT outcome, readers, NULL::uuid AS new_id
  FROM outbox.cancel(%(id)s::uuid, %(reason)s::text)
