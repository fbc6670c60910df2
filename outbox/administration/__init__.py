"""A DBA's tasks: the schema, the partitions, their retention, and the doctor."""
