"""Thousands of runs over faulty wires in virtual time, each drawn from one number: ``make torture``.

    python -m benchmarks.torture --schedules 2000 --seed 0

What runs is the project's own code, unchanged: sessions, endpoints, mailboxes, links, checkpoints, metrics. What it
touches of the world is simulated: the clock (clock.py), sockets, connections and the folder of addresses (wires.py),
the disk (disk.py), the training (method.py). Connections break and lose what is under way; the mesh falls apart and
heals; peers stall, stop, and crash in the middle of whatever they do. A Schedule (schedule.py) is drawn from a seed;
the mesh (mesh.py) plays it, and says what went against the promises of docs/reliability.md. The same seed plays the
same events, bit for bit. plants.py holds bugs planted on purpose: a search that does not find them is worth nothing.

It stands among the benchmarks because it is run by hand and by the clock, as they are, and ships with no wheel: the
tests only play a few dozen schedules.
"""
