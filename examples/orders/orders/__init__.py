"""A shop that takes orders and bills them: what pillarbox's tutorial builds."""
