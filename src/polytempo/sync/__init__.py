"""Who may go on, and when: pure, deterministic, standard library only."""
