"""What is measured: speed in paired ratios, and the papers' claims."""
