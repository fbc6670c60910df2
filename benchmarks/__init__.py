"""Measurements of speed and memory: one module for each question."""
