"""What tests need: real servers that live as long as a block.

Import from the modules: `outbox.testing.postgres`, `outbox.testing.redis`.
"""
