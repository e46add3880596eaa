"""One peer's run: build, round loop, records, checkpoints, the run folder, and all peers in one process."""
