"""What a DBA runs: the schema, the partitions, their retention, and the doctor."""
