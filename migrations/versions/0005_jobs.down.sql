-- Owner part: drop the jobs, and forget them in the policy and in pg_partman.

SET LOCAL ROLE {owner};
DELETE FROM {partman}.part_config WHERE parent_table = 'inbox.job';
DELETE FROM outbox.partition_policy WHERE parent_table = 'inbox.job';
DROP TABLE inbox.job, inbox.job_template;
RESET ROLE;
