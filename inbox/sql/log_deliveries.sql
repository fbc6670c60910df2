-- Does:  Record why and for how long deliveries wait, or that they were acked.
-- Takes: consumer; arrays of the same length: lanes, seqs, moments, attempts, causes, delays (seconds; null: no due time), keys
-- Gives: nothing
-- Index: none; adds to all indexes of inbox.deferral
INSERT INTO inbox.deferral (consumer, lane, seq, created_at, attempts, cause, due_at, key)
SELECT %(consumer)s, lane, seq, created_at, attempts, cause, clock_timestamp() + make_interval(secs => delay), key
  FROM unnest(%(lanes)s::smallint[], %(seqs)s::bigint[], %(moments)s::timestamptz[], %(attempts)s::integer[],
              %(causes)s::text[], %(delays)s::float8[], %(keys)s::text[])
       AS entry (lane, seq, created_at, attempts, cause, delay, key)
