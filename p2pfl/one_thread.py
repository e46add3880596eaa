"""Environment of a process that imports torch and forks peers afterwards."""

ENVIRONMENT = {
    # Libraries must not start threads before the fork, so these limits come before they are imported.
    **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")},
    # Threads of peers that wait for work sleep. By default they spin, which takes cores from other peers: with two
    # threads each, four peers on two cores took 28 to 44 s that way and 8 s this way.
    "OMP_WAIT_POLICY": "PASSIVE",
}
