-- Administrator part: the schemas. roles.sql has created the roles.

CREATE SCHEMA IF NOT EXISTS outbox;
CREATE SCHEMA IF NOT EXISTS inbox;
ALTER SCHEMA outbox OWNER TO {owner};
ALTER SCHEMA inbox OWNER TO {owner};
COMMENT ON SCHEMA outbox IS 'pillarbox: messages for the relay to publish';
COMMENT ON SCHEMA inbox IS 'pillarbox: receipts and deliveries of consumers';
