"""For tests of training scripts, and for notebooks: whole jobs inside one process."""
