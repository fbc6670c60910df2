-- Owner part, repeated by every migration: who may do what with the policy, the partitions and the upkeep.

SET LOCAL ROLE {owner};

REVOKE ALL ON FUNCTION outbox.set_interval(text, interval, integer) FROM PUBLIC;
REVOKE ALL ON FUNCTION outbox.adopt_table(text), outbox.make_partitions(text), outbox.make_partitions_at(text, timestamptz[]),
    outbox.trim_foreign_receipts_batch() FROM PUBLIC;
REVOKE ALL ON PROCEDURE outbox.trim_foreign_receipts() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION outbox.make_partitions(text), outbox.trim_foreign_receipts_batch() TO {maintainer};
GRANT EXECUTE ON PROCEDURE outbox.trim_foreign_receipts() TO {maintainer};
GRANT SELECT ON outbox.partition_policy TO {maintainer}, {monitor}, {application}, {relay}, {consumer};
GRANT SELECT ON outbox.partition_health TO {maintainer}, {monitor}, {relay};
REVOKE ALL ON FUNCTION outbox.detach_expired(text, regclass[], interval), outbox.upkeep_plan(text), outbox.finish_detached(text),
    outbox.count_unsettled(text, regclass), outbox.schedule_detaches() FROM PUBLIC;
REVOKE ALL ON PROCEDURE outbox.maintain(integer, interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION outbox.detach_expired(text, regclass[], interval), outbox.finish_detached(text), outbox.upkeep_plan(text) TO {maintainer};
GRANT EXECUTE ON PROCEDURE outbox.maintain(integer, interval) TO {maintainer};
GRANT EXECUTE ON FUNCTION outbox.upkeep_plan(text) TO {monitor};
-- As a member of the owner it has this anyway; said here, the role stays while this database needs it.
GRANT USAGE ON SCHEMA outbox TO {detacher};
GRANT SELECT ON outbox.retiring_partition, outbox.dropped_partition, outbox.kept_partition TO {maintainer}, {monitor};
REVOKE ALL ON FUNCTION outbox.put_back_settings(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION outbox.put_back_settings(text) TO {maintainer};
REVOKE ALL ON FUNCTION outbox.note_success(), outbox.note_failure(text), outbox.accept_clock(), outbox.holder_of_lock(bigint),
    outbox.archive_problem(text), outbox.archive_partition(text, regclass, timestamptz, timestamptz) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION outbox.note_success(), outbox.note_failure(text), outbox.accept_clock() TO {maintainer};
GRANT SELECT ON outbox.upkeep TO {maintainer}, {monitor}, {relay};

RESET ROLE;
