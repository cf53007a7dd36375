"""The parameter server: shards that keep values and optimizer state and carry out the job's log."""
