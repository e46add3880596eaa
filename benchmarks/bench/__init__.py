"""``make bench``: speed, memory and disk in paired runs, with their goals beside them (docs/benchmarks.md)."""
