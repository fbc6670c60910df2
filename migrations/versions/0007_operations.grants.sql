-- Owner part, repeated at the end of every migration: who may do what. Rendered from
-- migrations/grants.py; change it there, and run python -m outbox.migrations.grants.

SET LOCAL ROLE {owner};

-- Whatever an earlier version granted: what is still needed is granted again below, in the same
-- transaction.
REVOKE ALL
    ON TABLE
        outbox.operation
    FROM {web};
REVOKE ALL ON FUNCTION outbox.trim_operations() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION outbox.trim_operations() TO {maintainer};
-- What was asked for, and by whom, can't be changed afterwards.
GRANT SELECT,
      INSERT (kind, selection, reason, asked_by, expected),
      UPDATE (state, succeeded, failed, skipped, problem, finished_at, stopped_by)
    ON outbox.operation
    TO {web};

RESET ROLE;
