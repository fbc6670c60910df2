-- Does:  Cancel a scheduled message, and add one with its content and another id for another time.
-- Takes: id, available_at, reason (null: none)
-- Gives: outcome, readers (as cancel_message.sql), new_id (null: nothing was changed)
-- Index: message_pkey and deferral_message_idx of the days around the moment in the id
SELECT outcome, readers, new_id
  FROM outbox.move(%(id)s::uuid, %(available_at)s::timestamptz, %(reason)s::text)
