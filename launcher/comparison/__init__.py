"""Comparisons of runs over seeds: groups, curves, statistics and tables."""
