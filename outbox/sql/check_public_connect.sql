-- Does:  Report if PUBLIC may connect to this database, as it may by default.
-- Takes: roles
-- Gives: severity, finding, remedy
-- Index: none
SELECT 'hint', 'every role may connect to this database and take the advisory locks that relays and the upkeep need',
       format('REVOKE CONNECT ON DATABASE %%1$I FROM PUBLIC; GRANT CONNECT ON DATABASE %%1$I TO %%2$s;', datname,
              (SELECT string_agg(quote_ident(r.name), ', ' ORDER BY r.turn) FROM unnest(%(roles)s::text[]) WITH ORDINALITY AS r (name, turn)))
  FROM pg_catalog.pg_database
 WHERE datname = current_database()
   AND EXISTS (SELECT FROM aclexplode(coalesce(datacl, acldefault('d', datdba))) AS granted
                WHERE granted.grantee = 0 AND granted.privilege_type = 'CONNECT')
