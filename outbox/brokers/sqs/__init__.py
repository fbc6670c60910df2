"""Amazon SQS and SNS: code shared by their publisher and their source."""
