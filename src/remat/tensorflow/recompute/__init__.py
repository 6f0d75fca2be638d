"""``recompute``: a function or a layer whose activations are dropped and made again."""
