-- Does:  Discard a dead letter, and record the reason and the person.
-- Takes: id, created_at, reason, person (on whose behalf; null: the login's own)
-- Gives: message_id, origin, if it was still PENDING
-- Index: dead_letter_pkey, in one partition
UPDATE {schema}.dead_letter
   SET status = 'DISCARDED',
       discard_reason = CAST(%(reason)s AS text),
       discarded_by = session_user || coalesce(' for ' || CAST(%(person)s AS text), ''),
       updated_at = now()
 WHERE id = CAST(%(id)s AS uuid)
   AND created_at = CAST(%(created_at)s AS timestamptz)
   AND status = 'PENDING'
RETURNING message_id, origin
