-- Owner part, repeated at the end of every migration: who may do what. What an earlier version
-- granted is revoked first, in the same transaction.

SET LOCAL ROLE {owner};
{revoke_all};
REVOKE ALL ON FUNCTION outbox.trim_operations() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION outbox.trim_operations() TO {maintainer};
-- What was asked for, and by whom, can't be changed afterwards.
GRANT SELECT,
      INSERT (kind, selection, reason, asked_by, expected),
      UPDATE (state, succeeded, failed, skipped, problem, finished_at, stopped_by)
    ON outbox.operation
    TO {web};

RESET ROLE;
