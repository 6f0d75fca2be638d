"""Models that we did not write, or that are written as others write them: what a budget does to each of them."""
