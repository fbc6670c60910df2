-- Does:  Find which of these messages have an entry in the log.
-- Takes: reader, ids, created_ats (same length), first and last of created_ats
-- Gives: id, created_at
-- Index: deferral_message_idx on each partition between first and last
SELECT read.id, read.created_at
  FROM unnest(%(ids)s::uuid[], %(created_ats)s::timestamptz[]) AS read (id, created_at)
 WHERE (SELECT true
          FROM outbox.deferral AS d
         WHERE d.id = read.id
           AND d.created_at = read.created_at
           AND d.created_at BETWEEN %(first)s AND %(last)s
           AND (d.reader = %(reader)s) IS TRUE
         LIMIT 1)
