-- Does:  List replication slots that have no reader, or that are far behind.
-- Takes: nothing
-- Gives: slot_name, the same as a string literal, active, age
-- Index: none
SELECT slot_name, quote_literal(slot_name::text), active, age(coalesce(xmin, catalog_xmin))
  FROM pg_replication_slots
 WHERE NOT active OR age(coalesce(xmin, catalog_xmin)) > 1000000
