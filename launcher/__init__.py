"""The ``p2pfl`` command: reads a run file, starts peers, follows them and reports. Plays no part in training."""
