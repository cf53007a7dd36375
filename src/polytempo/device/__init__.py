"""Memory of GPUs that processes of one host share, and the fences that order their streams."""
