"""p2pfl: what a peer learns and what it says. No sockets, no processes, no command line in here."""
