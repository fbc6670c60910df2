-- Owner part: drops the jobs and the suspects, with their policy and pg_partman's configuration.

SET LOCAL ROLE {owner};
DELETE FROM {partman}.part_config WHERE parent_table IN ('inbox.job', 'inbox.suspect');
DELETE FROM outbox.partition_policy WHERE parent_table IN ('inbox.job', 'inbox.suspect');
DROP VIEW inbox.message_life, inbox.job_status;
DROP TABLE inbox.job, inbox.job_template, inbox.suspect, inbox.suspect_template;
RESET ROLE;
