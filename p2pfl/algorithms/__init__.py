"""The algorithms that a run file can name, one file per paper."""

from __future__ import annotations

from typing import Any

from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.cga import CGA
from p2pfl.algorithms.def_kt import DefKT
from p2pfl.algorithms.dfedavgm import DFedAvgM
from p2pfl.algorithms.dfml import DFML
from p2pfl.algorithms.ditto import Ditto
from p2pfl.algorithms.dpsgd import DPSGD
from p2pfl.algorithms.fedavg import FedAvg
from p2pfl.algorithms.fedavg_dec import FedAvgDec, FedProxDec
from p2pfl.algorithms.fedavg_ssl import FedAvgSSL
from p2pfl.algorithms.fedclassavg import FedClassAvg
from p2pfl.algorithms.feddistill import FedDistill
from p2pfl.algorithms.fedfomo import FedFomo
from p2pfl.algorithms.fedgen import FedGen
from p2pfl.algorithms.fedkd import FedKD
from p2pfl.algorithms.fedproto import FedProto
from p2pfl.algorithms.fedrolex import FedRolex
from p2pfl.algorithms.fedsim import FedSim
from p2pfl.algorithms.fedstyle import FedStyle
from p2pfl.algorithms.fedstyle_baselines import APFLSSL, DittoSSL, FedPerSSL, FedProxSSL, FedRepSSL
from p2pfl.algorithms.fedtgp import FedTGP
from p2pfl.algorithms.flt import FLT
from p2pfl.algorithms.fml import FML
from p2pfl.algorithms.fml_dec import FMLDec
from p2pfl.algorithms.heterofl import HeteroFL
from p2pfl.algorithms.l2c import L2C
from p2pfl.algorithms.lg_fedavg import LGFedAvg
from p2pfl.algorithms.local import Local
from p2pfl.algorithms.mapl import MAPL
from p2pfl.algorithms.mapl_plus import MAPLPlus
from p2pfl.algorithms.meta_l2c import MetaL2C
from p2pfl.algorithms.pfedsim import PFedSim
from p2pfl.algorithms.registration import ALGORITHMS, algorithm

_ALGORITHMS: tuple[type[Algorithm[Any]], ...] = (
    Local,
    FedAvg,
    LGFedAvg,
    FedSim,
    FedClassAvg,
    PFedSim,
    FLT,
    Ditto,
    DPSGD,
    DFedAvgM,
    CGA,
    MAPL,
    MAPLPlus,
    L2C,
    MetaL2C,
    FedFomo,
    FedProto,
    FedTGP,
    FedDistill,
    FedGen,
    FML,
    FedKD,
    DFML,
    FedAvgDec,
    FedProxDec,
    FMLDec,
    DefKT,
    HeteroFL,
    FedRolex,
    FedStyle,
    FedAvgSSL,
    FedPerSSL,
    FedRepSSL,
    FedProxSSL,
    APFLSSL,
    DittoSSL,
)

for _method in _ALGORITHMS:
    algorithm(_method.name)(_method)

__all__ = ["ALGORITHMS", "algorithm"]
