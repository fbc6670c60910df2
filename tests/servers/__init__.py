"""Private servers of brokers, for tests, demo and benchmarks."""
