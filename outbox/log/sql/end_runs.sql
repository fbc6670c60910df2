-- Does:  Record that messages have stopped waiting, and their outcomes.
-- Takes: reader, ids, created_ats, lanes, seqs, runs, attempts, outcomes, keys (same length)
-- Gives: nothing
-- Index: deferral_settled_idx, for conflicts: another relay may have recorded the same
INSERT INTO outbox.deferral (reader, id, created_at, lane, seq, run, attempts, cause, outcome, key)
SELECT %(reader)s, id, created_at, lane, seq, run, attempts, 'settled', outcome, key
  FROM unnest(%(ids)s::uuid[], %(created_ats)s::timestamptz[], %(lanes)s::smallint[], %(seqs)s::bigint[],
              %(runs)s::integer[], %(attempts)s::integer[], %(outcomes)s::text[], %(keys)s::text[])
       AS ended (id, created_at, lane, seq, run, attempts, outcome, key)
    ON CONFLICT (id, run, reader, created_at) WHERE cause = 'settled' DO NOTHING
