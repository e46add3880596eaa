"""Peers on hosts without a scheduler, by ssh."""
