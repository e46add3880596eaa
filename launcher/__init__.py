"""The ``p2pfl`` command: read a run file, start peers, follow them and report. It takes no part in training."""
