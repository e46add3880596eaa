"""The papers' claims, as checks on real data."""
