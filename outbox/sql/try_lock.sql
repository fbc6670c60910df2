-- Does:  Take an advisory lock until the transaction ends, if it is free, and turn off the timeouts that would end it.
-- Takes: lock_class, lock
-- Gives: whether it was taken
-- Index: none
SELECT pg_try_advisory_xact_lock(CAST(%(lock_class)s AS integer), CAST(%(lock)s AS integer))
  -- transaction_timeout exists since PostgreSQL 17, and set_config() fails for unknown names.
  FROM (SELECT count(set_config(name, '0', true)) AS changed
          FROM pg_catalog.pg_settings
         WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')) AS unlimited
 WHERE changed > 0
