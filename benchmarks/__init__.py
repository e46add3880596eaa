"""Measurements: speed in paired ratios, runs under faults, and the papers' claims."""
