"""Gradients of data-parallel workers: buckets, gradient hooks, overlap with backward, and the ways they are averaged."""
