-- Administrator part: lets any member of the owner's role run later migrations, whichever role created
-- Alembic's table.

ALTER TABLE IF EXISTS outbox.alembic_version OWNER TO {owner};
