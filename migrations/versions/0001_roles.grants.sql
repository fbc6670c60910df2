-- Owner part, repeated by every migration: outbox doctor compares the version with its program's.

SET LOCAL ROLE {owner};

GRANT USAGE ON SCHEMA outbox TO {monitor};
GRANT SELECT ON outbox.alembic_version TO {monitor};

RESET ROLE;
