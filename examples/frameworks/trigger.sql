-- A trigger that adds a message for each new order, whoever inserts it:
-- psql -f examples/frameworks/trigger.sql
--
-- SECURITY DEFINER: otherwise each role that inserts an order needs pillarbox_application.
-- The function's owner must be a member of it, or a superuser.

CREATE FUNCTION announce_purchase() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM outbox.add('orders.placed', jsonb_build_object('reference', NEW.reference), key => NEW.reference);
    RETURN NULL;
END
$$;

CREATE TRIGGER announce_purchase AFTER INSERT ON purchase
    FOR EACH ROW EXECUTE FUNCTION announce_purchase();
