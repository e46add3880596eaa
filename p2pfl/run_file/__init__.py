"""The run file: its sections, how YAML becomes a checked run, addresses, keys, faults."""
