-- Does:  Check whether PUBLIC may connect to this database, as it may by default.
-- Takes: nothing
-- Gives: the database as an identifier, true or false
-- Index: none
SELECT quote_ident(datname),
       EXISTS (SELECT FROM aclexplode(coalesce(datacl, acldefault('d', datdba))) AS granted
                WHERE granted.grantee = 0 AND granted.privilege_type = 'CONNECT')
  FROM pg_catalog.pg_database
 WHERE datname = current_database()
