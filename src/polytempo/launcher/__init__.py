"""Starting a job's processes, watching them, showing how they are, and ending them all. Loads no torch."""
