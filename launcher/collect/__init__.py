"""Collect the run folders of peers on other hosts."""
