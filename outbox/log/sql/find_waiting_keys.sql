-- Does:  Find out which keys have messages that wait in the log and block them.
-- Takes: reader, lanes, keys (same length)
-- Gives: lane, key
-- Index: deferral_key_idx and deferral_message_idx on each partition
SELECT wanted.lane, wanted.key
  FROM unnest(%(lanes)s::smallint[], %(keys)s::text[]) AS wanted (lane, key)
 WHERE (SELECT true
          FROM outbox.deferral AS d
         WHERE d.reader = %(reader)s
           AND d.lane = wanted.lane
           AND d.key = wanted.key
           AND d.cause IN ('refused', 'postponed', 'blocked', 'unknown', 'open', 'found')
           -- Not a join, which may read the whole log.
           AND (SELECT true
                  FROM outbox.deferral AS later
                 WHERE later.id = d.id
                   AND later.created_at = d.created_at
                   AND (later.reader = %(reader)s) IS TRUE
                   AND (later.run > d.run
                        OR later.run = d.run AND (later.entry > d.entry OR later.cause = 'settled'))
                 LIMIT 1) IS NULL
         LIMIT 1)
