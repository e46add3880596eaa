"""The papers' claims, each decided by an interval over repeated runs. See docs/claims/README.md.

A module per paper declares claims; ``scheduler`` executes their runs, the cheapest undecided claim first, into a
store that keeps every run; ``ledger`` writes docs/claims.md from it.
"""
