"""Update rules of our own, and arithmetic on gradients and statistics: plain torch, without any network."""
