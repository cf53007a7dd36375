"""Training in virtual time: real gradients, simulated seconds. This folder uses torch; `simulate` does not."""
