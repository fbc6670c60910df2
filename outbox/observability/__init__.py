"""What a process tells the outside: logs, metrics, health, and a watchdog."""
