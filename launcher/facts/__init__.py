"""What is known of runs and sweeps: read from their folders and from the processes of their host."""
