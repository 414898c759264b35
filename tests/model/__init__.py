"""Engines on tiny models of every memory kind, and on a real one."""
