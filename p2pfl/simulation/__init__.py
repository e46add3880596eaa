"""All peers of a run in one process: over in-process links, and in virtual time."""
