"""The parameter server: an I/O loop, a coordinator that orders events, and a shard that holds values and optimizer state."""
