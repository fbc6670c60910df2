-- Does:  Record that a retry of a dead letter has succeeded.
-- Takes: id, created_at
-- Gives: id, if it was still PENDING
-- Index: dead_letter_pkey, in one partition
UPDATE {schema}.dead_letter
   SET status = 'SUCCEEDED',
       updated_at = now()
 WHERE id = CAST(%(id)s AS uuid)
   AND created_at = CAST(%(created_at)s AS timestamptz)
   AND status = 'PENDING'
RETURNING id
