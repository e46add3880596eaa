"""What the papers say will come out, as checks on real data."""
