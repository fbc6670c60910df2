-- Does:  Take an advisory lock until the transaction ends, if nobody has it; no setting ends that before.
-- Takes: lock_class, lock
-- Gives: whether it was taken
-- Index: none
SELECT pg_try_advisory_xact_lock(CAST(%(lock_class)s AS integer), CAST(%(lock)s AS integer))
  -- PostgreSQL has the second one from 17 on, and refuses what it doesn't know.
  FROM (SELECT count(set_config(name, '0', true)) AS changed
          FROM pg_catalog.pg_settings
         WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')) AS unlimited
 WHERE changed > 0
