-- Does:  Find the first waiting message of a key, which blocks the others.
-- Takes: reader, lane, key, seq (of one that is blocked)
-- Gives: id, due_at
-- Index: deferral_key_idx and deferral_message_idx of each partition
SELECT d.id, d.due_at
  FROM outbox.deferral AS d
 WHERE d.reader = %(reader)s
   AND d.lane = %(lane)s
   AND d.key = %(key)s::text
   AND d.seq < %(seq)s
   AND d.cause IN ('refused', 'postponed', 'blocked')
   -- Not a join, which may read the whole log.
   AND (SELECT true
          FROM outbox.deferral AS later
         WHERE later.id = d.id
           AND (later.reader = d.reader) IS TRUE
           AND later.created_at = d.created_at
           AND (later.run > d.run
                OR later.run = d.run AND (later.entry > d.entry OR later.cause = 'settled'))
         LIMIT 1) IS NULL
 ORDER BY d.seq
 LIMIT 1
