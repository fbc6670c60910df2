-- Does:  Record that the consumer acked these deliveries: one mark for each lane, quarter of an hour and range of 4096 seqs.
-- Takes: consumer; arrays of the same length: lanes, seqs, moments
-- Gives: nothing
-- Index: none; adds to ack_lane_idx
INSERT INTO inbox.ack (created_at, consumer, lane, first_seq, last_seq, seqs, moments)
SELECT date_bin('15 minutes', created_at, '2000-01-01 00:00:00+00') AS bin, %(consumer)s, lane, min(seq), max(seq),
       array_agg(seq ORDER BY seq), array_agg(created_at ORDER BY seq)
  FROM unnest(%(lanes)s::smallint[], %(seqs)s::bigint[], %(moments)s::timestamptz[]) AS acked (lane, seq, created_at)
 GROUP BY bin, lane, seq / 4096
