-- A writer in SQL, for psql and for every language with a driver:
-- psql -v ON_ERROR_STOP=1 -v reference=A-1 -f examples/frameworks/writer.sql
--
-- Never insert into outbox.message yourself: outbox.add() makes the id, computes the lane that
-- keeps a key in order, and checks the rules. The role must be a member of pillarbox_application.

BEGIN;
INSERT INTO purchase (reference) VALUES (:'reference');
SELECT outbox.add('orders.placed', jsonb_build_object('reference', :'reference'), key => :'reference');
COMMIT;
