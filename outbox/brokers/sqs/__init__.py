"""Amazon SQS and SNS, for their publisher and their source."""
