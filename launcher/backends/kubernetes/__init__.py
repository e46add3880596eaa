"""Peers as pods of a Kubernetes cluster."""
