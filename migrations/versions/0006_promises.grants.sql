-- Owner part, repeated at the end of every migration: who may do what. What an earlier version
-- granted is revoked first, in the same transaction.

SET LOCAL ROLE {owner};
{revoke_all};
GRANT SELECT ON outbox.index_promise TO {monitor};
RESET ROLE;
