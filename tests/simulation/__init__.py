"""Seeded search for bugs over simulated faulty connections, in virtual time: ``make search``.

    python -m tests.simulation --schedules 2000 --seed 0

Sessions, endpoints, mailboxes, links, checkpoints and metrics are the project's real code. The outside world is
simulated: the clock (p2pfl/simulation/virtual_loop.py), connections (network.py), sockets (sockets.py), the I/O
thread and the address folder (world.py), the disk (disk.py) and the training (algorithm.py).

A seed determines a Schedule (schedule.py), which run_schedule.py runs: mesh.py starts the peers (process.py) and
injects the faults, and oracle.py compares what they do with the promises of docs/reliability.md and with a fault-free
run (reference.py). The same seed gives the same events, bit for bit, in any process. planted_bugs.py holds deliberate
bugs that the search must find.
"""
