"""The worker's side of the parameter server: pushes, pulls, and their retries."""
