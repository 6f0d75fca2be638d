"""``recompute``: a function whose activations are dropped and made again when the backward pass needs them."""
