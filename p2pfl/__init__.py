"""p2pfl: peer-to-peer personalized learning. What a peer learns and sends, without sockets or processes."""

PeerId = int
"""0 to ``peers - 1``."""
