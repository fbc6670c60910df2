"""For the tests of consumers; servers and events are in `outbox.testing`."""
