"""Sweeps: many runs of one run file with other values and seeds, in one folder, each a separate process."""
