-- Owner part, repeated at the end of every migration: who may do what. Rendered from
-- migrations/grants.py; change it there, and run python -m outbox.migrations.grants.

SET LOCAL ROLE {owner};

-- Whatever an earlier version granted: what is still needed is granted again below, in the same
-- transaction.
REVOKE ALL
    ON TABLE
        outbox.alembic_version
    FROM {monitor};
GRANT USAGE ON SCHEMA outbox TO {monitor};
-- pillarbox doctor compares the version with its own.
GRANT SELECT ON outbox.alembic_version TO {monitor};

RESET ROLE;
