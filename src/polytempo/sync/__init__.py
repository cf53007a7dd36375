"""Synchronisation policies: which worker may start which step, and when. Pure, deterministic, standard library only."""
