"""Peers on the nodes of a Slurm allocation."""
