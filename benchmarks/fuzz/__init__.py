"""Fuzzing: invalid bytes for the decoder, and for the sockets of peers in the middle of a run.

    python -m benchmarks.fuzz decoder --frames 1000000     # guided by coverage (atheris, pip install '.[fuzz]')
    python -m benchmarks.fuzz live --seconds 240           # whole runs of four peers

``decoder`` decodes messages, most of them mutated from valid ones. Each must be rejected with a WireError, or be
bit-identical after it is encoded and decoded again.

``live`` runs four peers as processes, without keys. Their graph has a fifth peer that never joins; an attacker takes
its place: it may send to all four and answers them. It sends mutated messages of every kind, and valid ones with
false rounds, epochs, windows and references. Unknown clients also open connections and send mutated ZMTP from the
greeting on. All peers must end with exit code 0 and the same bits as `p2pfl simulate`.
"""
