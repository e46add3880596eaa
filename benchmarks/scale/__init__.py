"""How launches grow with peers, neighbors and hosts: measured, fitted, and predicted."""
