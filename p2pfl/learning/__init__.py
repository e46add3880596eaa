"""Local learning: training, evaluation, losses, the linear probe."""
