"""Compression of pushes and pulls: casts, sparsification, signs, and key caching."""
