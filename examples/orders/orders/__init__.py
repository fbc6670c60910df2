"""A shop that takes orders and bills them: the result of pillarbox's tutorial."""
