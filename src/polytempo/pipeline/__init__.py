"""A model cut into stages: what each stage does when, and what follows from it."""
