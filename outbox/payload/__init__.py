"""Payloads: as JSON, in an encoding of your own, and the schemas that they match."""
