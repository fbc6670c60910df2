-- Owner part, repeated at the end of every migration: who may do what. What an earlier version
-- granted is revoked first, in the same transaction.

SET LOCAL ROLE {owner};
{revoke_all};
GRANT SELECT, INSERT, UPDATE ON inbox.job TO {consumer};
GRANT SELECT,
      INSERT,
      UPDATE (starts, started_at, is_open, error_reason, error_stacktrace),
      DELETE
    ON inbox.suspect
    TO {consumer};
GRANT SELECT ON inbox.message_life TO {monitor};
GRANT SELECT (message_id, message_at, consumer, starts, started_at, is_open, error_reason)
    ON inbox.suspect
    TO {monitor};
GRANT SELECT ON inbox.job_status TO {consumer}, {monitor};
GRANT SELECT (message_id, message_at, consumer, state, lease, attempts, lease_until,
              queued_at, started_at, cancel_requested_at, finished_at, topic, key, tenant,
              worker, reason)
    ON inbox.job
    TO {monitor};
-- To cancel a job.
GRANT INSERT (message_id, message_at, consumer, state, cancel_requested_at, reason),
      UPDATE (state, cancel_requested_at, finished_at, reason, lease_until)
    ON inbox.job
    TO {web};

RESET ROLE;
