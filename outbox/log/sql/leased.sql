-- Does:  Part of each claim: from where to read each leased lane.
-- Takes: lanes, starts, up_tos (null: several parts), snapshots, as_ofs (same length; see outbox/log/progress.py); hidden (transactions) and their floors; since (they include all from this one on) and floor
-- Gives: lane, up_to, snapshot, as_of, start
-- Index: none
lane, up_to, snapshot::pg_snapshot AS snapshot, as_of::pg_snapshot AS as_of,
       least(start, CASE WHEN as_of IS NULL THEN lowest.floor END) AS start
  FROM unnest(%(lanes)s::smallint[], %(starts)s::bigint[], %(up_tos)s::bigint[], %(snapshots)s::text[],
              %(as_ofs)s::text[]) AS leased (lane, start, up_to, snapshot, as_of),
       (SELECT least(min(h.floor), CASE WHEN pg_snapshot_xmax(pg_current_snapshot()) > %(since)s::text::xid8
                                        THEN %(floor)s::bigint END)
          FROM unnest(%(hidden)s::text[], %(floors)s::bigint[]) AS h (xid, floor)
         WHERE pg_visible_in_snapshot(h.xid::xid8, pg_current_snapshot())) AS lowest (floor)
