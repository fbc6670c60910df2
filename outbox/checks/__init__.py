"""The checks of `outbox doctor`, a module each; `outbox.check` is their contract."""
