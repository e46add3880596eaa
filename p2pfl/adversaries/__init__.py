"""Adversaries: what some peers of a run do wrong, on purpose. The run file's key ``adversaries`` names them.

An attack says what is sent in place of the truth (``Adversary``). ``Attacking`` is the pipeline of a peer that
attacks.
"""

from __future__ import annotations

from p2pfl.adversaries.base import ADVERSARIES as ADVERSARIES
from p2pfl.adversaries.base import Adversary as Adversary
from p2pfl.adversaries.base import adversary as adversary
from p2pfl.registry import discover

discover(__name__, ADVERSARIES)
