"""The papers' claims, each decided by an interval over repeated runs. See docs/claims/method.md.

``papers`` declares the claims and their runs as data, which ``declared`` reads; ``figures`` computes what is compared
with a threshold; ``pages`` writes docs/claims from the packed runs of the study, which was closed in November 2026.
"""
