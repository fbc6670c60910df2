"""Logs, metrics, health checks, heartbeat and watchdog of a process."""
