"""The shop of `pillarbox demo`, over other brokers and in containers."""
