"""pillarbox's relay with a publisher that uses aio-pika's publish."""
