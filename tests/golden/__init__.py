"""Pinned outcomes: what a set of small runs must end with, bit for bit, on a known CPU and torch version."""
