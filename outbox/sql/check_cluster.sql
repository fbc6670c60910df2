-- Does:  Find out whether the tables came from another cluster by a dump or a logical replica, and weren't migrated since: relays and consumers refuse to start, because transaction ids are only valid in their cluster.
-- Takes: migrate
-- Gives: severity, finding, remedy
-- Index: base_pkey
SELECT 'error',
       'this database was restored or copied to this cluster: its relays and consumers won''t start',
       %(migrate)s
 WHERE NOT EXISTS (SELECT FROM outbox.base AS b
                    WHERE b.cluster = split_part(outbox.cluster(), '/', 1)
                      AND b.seq > ALL (SELECT other.seq FROM outbox.base AS other WHERE other.cluster <> b.cluster))
