-- Administrator part, safe to repeat: the schemas are the owner's. Created for the owner, they get none of the
-- default privileges of the role that migrates.

CREATE SCHEMA IF NOT EXISTS outbox AUTHORIZATION {owner};
CREATE SCHEMA IF NOT EXISTS inbox AUTHORIZATION {owner};
ALTER SCHEMA outbox OWNER TO {owner};
ALTER SCHEMA inbox OWNER TO {owner};
COMMENT ON SCHEMA outbox IS 'pillarbox: messages for the relay to publish';
COMMENT ON SCHEMA inbox IS 'pillarbox: receipts and deliveries of consumers';
