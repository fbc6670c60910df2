-- Does:  Write marks, each with the outcome of the messages between two positions in ids.
-- Takes: ids, and arrays of the same length: bins (created_at rounded down to 15 minutes), lanes, first_seqs, last_seqs, outcomes, starts and ends (positions in ids, from 1)
-- Gives: nothing
-- Index: none
INSERT INTO outbox.settlement (created_at, lane, first_seq, last_seq, outcome, ids)
SELECT bin, lane, first_seq, last_seq, outcome, (%(ids)b::uuid[])[starts_at:ends_at]
  FROM unnest(%(bins)s::timestamptz[], %(lanes)s::smallint[], %(first_seqs)s::bigint[], %(last_seqs)s::bigint[],
              %(outcomes)s::text[], %(starts)s::integer[], %(ends)s::integer[])
       AS mark (bin, lane, first_seq, last_seq, outcome, starts_at, ends_at)
