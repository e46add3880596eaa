"""A real Kubernetes of one node on this machine, in namespaces of its own, and runs of `p2pfl k8s` in it."""
