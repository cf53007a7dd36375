"""Tables and pictures of outcomes."""
