-- Administrator part: by whatever role Alembic made its table, any member of the owner's role can go
-- on from here.

ALTER TABLE IF EXISTS outbox.alembic_version OWNER TO {owner};
