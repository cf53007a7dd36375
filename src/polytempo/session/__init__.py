"""A process's place in its job: `init`, rank and size, its positions in the data, its metrics, and its end."""
