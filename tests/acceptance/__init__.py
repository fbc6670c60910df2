"""The promises, with real processes that are killed, stopped and cut off."""
