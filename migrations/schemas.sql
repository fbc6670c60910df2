-- Administrator part, safe to repeat: the schemas are the owner's. env.py has created them, and roles.sql the roles.

ALTER SCHEMA outbox OWNER TO {owner};
ALTER SCHEMA inbox OWNER TO {owner};
COMMENT ON SCHEMA outbox IS 'pillarbox: messages and their outcomes';
COMMENT ON SCHEMA inbox IS 'pillarbox: receipts, jobs and dead letters of consumers';
