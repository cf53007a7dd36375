"""Tensor parallelism: layers split over the ranks of a group."""
