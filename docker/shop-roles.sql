-- The login roles of the shop, each with only the privileges it needs. Safe to repeat.
-- Runs after pillarbox migrate, which creates the roles pillarbox_*.
\set ON_ERROR_STOP on
\set relay_password `cat /run/secrets/relay-password`
\set consumer_password `cat /run/secrets/consumer-password`
\set shop_password `cat /run/secrets/shop-password`
\set web_password `cat /run/secrets/web-password`

SELECT format('CREATE ROLE %I LOGIN', name)
  FROM unnest(ARRAY['shop', 'shop_relay', 'shop_consumer', 'shop_web']) AS name
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name)
\gexec

ALTER ROLE shop_relay PASSWORD :'relay_password';
ALTER ROLE shop_consumer PASSWORD :'consumer_password';
ALTER ROLE shop PASSWORD :'shop_password';
ALTER ROLE shop_web PASSWORD :'web_password';

GRANT pillarbox_relay TO shop_relay;
GRANT pillarbox_reader, pillarbox_consumer TO shop_consumer;
GRANT pillarbox_application TO shop;
-- The page retries dead letters of both sides, so it needs the privileges of relay and consumer.
GRANT pillarbox_web, shop_relay, shop_consumer, pg_read_all_stats TO shop_web;

-- The shop's own tables, and the privileges that its consumers need on them.
CREATE SCHEMA IF NOT EXISTS pillarbox_demo AUTHORIZATION shop;
GRANT USAGE ON SCHEMA pillarbox_demo TO shop_consumer;
ALTER DEFAULT PRIVILEGES FOR ROLE shop IN SCHEMA pillarbox_demo
  GRANT SELECT, INSERT ON TABLES TO shop_consumer;
ALTER DEFAULT PRIVILEGES FOR ROLE shop IN SCHEMA pillarbox_demo
  GRANT USAGE ON SEQUENCES TO shop_consumer;

-- For the final count, which a real application doesn't need: it compares orders with
-- the messages in the outbox.
GRANT pillarbox_monitor TO shop;
GRANT SELECT (payload) ON outbox.message TO shop;
