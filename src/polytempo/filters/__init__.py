"""What is sent instead of everything: casts, selections, signs, and lists of keys that are sent once."""
