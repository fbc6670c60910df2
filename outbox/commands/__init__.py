"""The commands of `outbox`, one module each; `outbox.command` has what they share."""
