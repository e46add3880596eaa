"""Where peers run: as local processes, on several hosts, in containers, on Kubernetes, or simulated in a process."""
