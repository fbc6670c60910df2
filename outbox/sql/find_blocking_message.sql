-- Does:  Find the first waiting message of a key, which blocks the others.
-- Takes: reader, lane, key, seq (of one that is blocked), since (created_at of the first day to look in)
-- Gives: id, cause, due_at, attempts
-- Index: deferral_key_idx and deferral_message_idx of each partition from since on
SELECT d.id, d.cause, d.due_at, d.attempts
  FROM outbox.deferral AS d
 WHERE d.reader = %(reader)s
   AND d.lane = %(lane)s
   AND d.key = %(key)s::text
   AND d.seq < %(seq)s
   AND d.cause IN ('refused', 'postponed', 'blocked')
   AND d.created_at >= %(since)s::timestamptz
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
