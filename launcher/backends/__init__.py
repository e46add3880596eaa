"""Where peers run: local processes, containers, or a single process (simulate)."""
