"""Models as vectors: sums over their parts, and combinations of several."""
