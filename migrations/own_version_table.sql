-- Administrator part: whichever role created Alembic's table, any member of the owner's role can run
-- later migrations.

ALTER TABLE IF EXISTS outbox.alembic_version OWNER TO {owner};
