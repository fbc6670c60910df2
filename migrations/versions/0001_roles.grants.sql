-- Owner part, repeated at the end of every migration: who may do what. What an earlier version
-- granted is revoked first, in the same transaction.

SET LOCAL ROLE {owner};
{revoke_all};
GRANT USAGE ON SCHEMA outbox TO {monitor};
-- pillarbox doctor compares the version with its own.
GRANT SELECT ON outbox.alembic_version TO {monitor};

RESET ROLE;
