"""One peer's run: build, round loop, records, checkpoints."""
