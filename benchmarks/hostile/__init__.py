"""Attackers among the peers: measurements beside published ones."""
