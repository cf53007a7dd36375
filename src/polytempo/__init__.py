"""Polytempo: synchronisation is a dial, not a fate."""
