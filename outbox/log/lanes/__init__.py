"""The lanes that a process has leased: whose turn it is, and which keys may go."""
