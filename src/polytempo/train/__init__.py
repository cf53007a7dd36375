"""The worker's side of a job: what a training script calls."""
