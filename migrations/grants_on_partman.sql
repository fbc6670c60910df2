-- Administrator part, run at the end of every migration and safe to repeat:
-- ALTER EXTENSION pg_partman UPDATE from 4.x to 5.x drops the grants on its objects.

GRANT USAGE ON SCHEMA {partman} TO {owner};
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {partman} TO {owner};
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {partman} TO {owner};
GRANT EXECUTE ON ALL PROCEDURES IN SCHEMA {partman} TO {owner};
-- For outbox doctor.
GRANT USAGE ON SCHEMA {partman} TO {monitor};
GRANT SELECT ON {partman}.part_config TO {monitor};
