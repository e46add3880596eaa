"""Combine copies of the run folders of peers on other hosts."""
