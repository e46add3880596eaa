"""One peer as an operating-system process: sockets, device slice, compute slots, signals, logs."""
