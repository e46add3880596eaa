"""Tables and figures, or parts of them, for which no run is declared, and why: the ledger has a row for each."""

from __future__ import annotations

from benchmarks.claims import dfml_paper_size as dfml
from benchmarks.claims import fedstyle_paper_size as fedstyle
from benchmarks.claims import fedtgp_paper_size as fedtgp
from benchmarks.claims import l2c_paper_size as l2c
from benchmarks.claims import mapl_paper_size as mapl
from benchmarks.claims.claim import Left

PAPER_SIZE_ONLY = "only at the paper's size"
COVERED = "decided by the runs of this table at the paper's size"

MAPL = (
    Left(
        "above FedProto and FedSim on other datasets",
        "Table 1",
        "above in all cells of CINIC-10 and SVHN; below FedProto on MNIST and, but for Sc. 2, Fashion-MNIST",
        PAPER_SIZE_ONLY,
        mapl.cells(("mapl", "fedproto", "fedsim"), (mapl.CINIC, "svhn", "mnist", "fashion-mnist")),
    ),
    Left(
        "above local training, CINIC-10 and SVHN, Sc. 2, 3, 4",
        "Table 1",
        "+8.95, +8.06 and +7.33 on CINIC-10; +4.00, +8.14 and +6.95 on SVHN",
        "needs these datasets",
        mapl.cells(("mapl", "local"), (mapl.CINIC, "svhn"), (2, 3, 4)),
    ),
    Left(
        "above FedClassAvg, CINIC-10 and SVHN, Sc. 2, 3, 4",
        "Table 1",
        "+1.62, +1.33 and +1.47 on CINIC-10; +2.29, +4.54 and +3.57 on SVHN",
        "needs these datasets",
        mapl.cells(("mapl", "fedclassavg"), (mapl.CINIC, "svhn"), (2, 3, 4)),
    ),
    Left(
        "above local training, MNIST and Fashion-MNIST, Sc. 2, 3, 4",
        "Table 1",
        "+0.91, +0.33 and +0.34 on MNIST; +0.67, +0.20 and +0.47 on Fashion-MNIST",
        PAPER_SIZE_ONLY,
        mapl.cells(("mapl", "local"), ("mnist", "fashion-mnist"), (2, 3, 4)),
    ),
    Left(
        "above FedClassAvg, MNIST and Fashion-MNIST, Sc. 1, 2, 3, 4",
        "Table 1",
        "+1.14, +1.57, +1.93 and +0.95 on MNIST; −0.20, +2.95, +1.34 and +1.09 on Fashion-MNIST",
        PAPER_SIZE_ONLY,
        mapl.cells(("mapl", "fedclassavg"), ("mnist", "fashion-mnist")),
    ),
    Left(
        "similarity gains",
        "Table 3",
        "+1.07 and +1.05, Sc. 1 and 2",
        'with equal γ, w without S stays uniform: the runs of Table 2\'s "the graph gains"',
    ),
    Left(
        "MAPL above FedSim and FedProto where networks are equal",
        "Table 9",
        "Sc. 1 to 4: +7.14, +4.90, +5.80 and +5.67 above FedSim; +4.27, +4.24, +5.00 and +7.14 above FedProto",
        PAPER_SIZE_ONLY,
        mapl.cells(("mapl", "fedsim", "fedproto"), networks="homo"),
    ),
    Left(
        "MAPL above FedClassAvg where networks are equal, Sc. 2, 3, 4",
        "Table 9",
        "+0.43, +0.40 and +1.05",
        PAPER_SIZE_ONLY,
        mapl.cells(("mapl", "fedclassavg"), scenarios=(2, 3, 4), networks="homo"),
    ),
    Left(
        "MAPL+ above FedAvg, pFedSim and FLT, Sc. 2, 3, 4",
        "Table 9",
        "+1.43, +0.46 and +2.81 above FedAvg; +1.96, +1.06 and +4.52 above pFedSim; +2.39, +0.46 and +3.76 above FLT",
        PAPER_SIZE_ONLY,
        mapl.cells(("mapl+", "fedavg", "pfedsim", "flt"), scenarios=(2, 3, 4), networks="homo"),
    ),
    Left(
        "CINIC-10 and SVHN",
        "Table 9",
        "in all 8 cells MAPL+ best, and MAPL above FedSim, FedClassAvg and FedProto",
        "needs these datasets",
        mapl.cells(tuple(mapl.METHODS), (mapl.CINIC, "svhn"), networks="homo"),
    ),
    Left(
        "MNIST and Fashion-MNIST",
        "Table 9",
        "MAPL+ not always best: Sc. 3, MNIST 98.13, FLT 99.00; MAPL below FedProto on MNIST in all four",
        PAPER_SIZE_ONLY,
        mapl.cells(tuple(mapl.METHODS), ("mnist", "fashion-mnist"), networks="homo"),
    ),
    Left("augmentations", "Table 8", "—", "a setting, not a result: `data.augment: mapl`"),
    Left("t-SNE of features", "Fig. 4", "two clusters after 200 rounds, not after 50", "a picture without a number"),
    Left("local training", "Fig. 1", "—", "an illustration of the method"),
    Left("similarity and evolution of the graph", "Fig. 2", "—", "an illustration of the method"),
)

L2C = (
    Left("the tasks", "Table 1", "—", "a setting: `topologies/paper/l2c-*.yaml`"),
    Left("CGA with five epochs", "Table 2", "diverges", "the paper does not say what its gradients are then"),
    Left(
        "L2C above DPSGD, CGA, FedAvg and Ditto, CIFAR-100 and MiniImageNet",
        "Table 2",
        "+18.44, +28.19, +18.85 and +4.72; +19.77, +22.38, +15.77 and +7.30; meta-L2C 0.72 and 1.23 less",
        "needs these datasets",
        l2c.cells(("l2c", "meta-l2c", "dpsgd", "cga", "fedavg", "ditto")),
    ),
    Left(
        "meta-L2C above FedFomo, CIFAR-100 and MiniImageNet",
        "Table 2",
        "+5.84 and +4.24",
        COVERED,
        l2c.cells(("meta-l2c", "fedfomo")),
    ),
    Left(
        "local above DPSGD, CGA and FedAvg, CIFAR-100 and MiniImageNet",
        "Table 2",
        "+14.91, +24.66 and +15.32; +11.33, +13.94 and +7.33",
        "needs these datasets",
        l2c.cells(("local", "dpsgd", "cga", "fedavg")),
    ),
    Left("L2C's worst fifth and FedFomo's", "Table 3", "−0.10 (85.10 against 85.20)", "too close to decide"),
    Left(
        "between CIFAR-10 and CIFAR-100",
        "Table 4",
        "−0.77 and −1.69 against an encoder of the same tasks",
        "needs CIFAR-100",
        l2c.cells(("meta-l2c", "transfer"), ("cifar10", "cifar100")),
    ),
    Left("decentralized learning", "Fig. 1", "—", "an illustration of the method"),
    Left("the tasks", "Fig. 2", "—", "an illustration; partition `shards`"),
    Left(
        "training loss", "Fig. 3", "L2C's and meta-L2C's fall faster", "the records kept here have no training loss"
    ),
    Left("weights of 100 peers", "Fig. 5", "a sparse topology", "a picture without a number"),
    Left(
        "a peer and its neighbors",
        "Fig. 6",
        "weights follow parent classes",
        "needs CIFAR-100",
        l2c.cells(("l2c", "meta-l2c"), ("cifar100",)),
    ),
)

FEDTGP = (
    Left(
        "above LG-FedAvg, FedGen, FML, FedKD and FedDistill in the cells without a row",
        "Table 1",
        "in all: +3.12 to +8.38 practical, +2.52 to +14.16 pathological",
        PAPER_SIZE_ONLY,
        fedtgp.cells_without_a_row("Table 1"),
    ),
    Left(
        "above LG-FedAvg, FedGen, FML, FedKD and FedDistill where they have no row, here and in Tables 3, 4, 11",
        "Table 2",
        "in all cells",
        "needs CIFAR-100",
        [*fedtgp.cells_without_a_row("Table 2"), *fedtgp.TABLES_3_4_11],
    ),
    Left(
        "networks that differ more cost FedTGP less than the others",
        "Table 2",
        "1.77 from HtFE2 to HtFE9 (to HtFE4 3.28), the others 3.53 to 11.23 (the text: to 15.04)",
        "the runs of this table at the paper's size have FedTGP's and FedProto's",
        [fedtgp.runs(fedtgp.ALL, f"practical-cifar100-{group}") for group in ("htfe2", "htfe4", "htfe9")],
    ),
    Left(
        "above FedProto with 10 and 20 epochs",
        "Table 3",
        "+8.46 and +7.91",
        "needs CIFAR-100",
        [fedtgp.runs(["fedproto"], local_epochs=epochs) for epochs in (10, 20)],
    ),
    Left(
        "FedTGP keeps its accuracy with more epochs",
        "Table 3",
        "46.44 to 46.94",
        "needs CIFAR-100",
        [fedtgp.runs([], local_epochs=epochs) for epochs in (1, 5, 10, 20)],
    ),
    Left(
        "FML and FedKD lose accuracy with more epochs",
        "Table 3",
        "39.08 to 36.02 and 41.06 to 39.08, from 5 epochs to 20",
        "needs CIFAR-100",
        [fedtgp.runs(["fml", "fedkd"], local_epochs=epochs, with_fedtgp=False) for epochs in (5, 20)],
    ),
    Left(
        "above FedProto with 64 and 1,024 features",
        "Table 4",
        "+15.57 and +14.77 (46.28 against 30.71, 45.98 against 31.21)",
        "needs CIFAR-100",
        [fedtgp.runs(["fedproto"], models=fedtgp.features(number)) for number in (64, 1024)],
    ),
    Left(
        "64 features cost FedProto more",
        "Table 4",
        "6.45 less than 256",
        "needs CIFAR-100",
        [fedtgp.runs(["fedproto"], models=fedtgp.features(n), with_fedtgp=False) for n in (64, 256)],
    ),
    Left(
        "1,024 features are worse than 256 for most methods",
        "Table 4",
        "FedTGP −0.32, FedProto −5.95; LG-FedAvg and FedGen gain",
        "needs CIFAR-100",
        [fedtgp.runs(fedtgp.ALL, models=fedtgp.features(number)) for number in (256, 1024)],
    ),
    Left("FedProto's and FedDistill's costs", "Table 5", "1.48 M as FedTGP, a fifth of it", "sizes of messages"),
    Left(
        "margin and F on Flowers102 and Tiny-ImageNet",
        "Table 6",
        "a margin gains 6.87 and 5.11, an adaptive margin 1.65 and 1.24, F 4.29 and 4.25; FedProto is below all",
        "needs these datasets",
        [fedtgp.ablations(f"practical-{dataset}") for dataset in ("flowers102", "tiny-imagenet")],
    ),
    Left(
        "τ = 1 and S = 1 above FedDistill, the best of the other methods",
        "Table 7",
        "+1.69 and +1.87 (43.23 and 43.41 against 41.54)",
        "needs CIFAR-100",
        [fedtgp.tau_or_s_of_one()],
    ),
    Left("S = 1,000 above 100", "Table 7", "+0.07 (47.01 against 46.94)", "too close to decide"),
    Left("FLOPs of the networks", "Table 8", "—", "a property of networks: `p2pfl models htfe8`"),
    Left("HtCNN8", "Table 9", "—", "a setting: `p2pfl models htcnn8`"),
    Left(
        "ResNet34 in place of ResNet18 costs FedTGP less than the others",
        "Table 11",
        "0.05 (46.47 to 46.42), the others 0.34 to 2.70",
        "the runs of this table at the paper's size have FedTGP's, FedProto's and LG-FedAvg's",
        [fedtgp.runs(fedtgp.ALL, models=fedtgp.resnet(depth)) for depth in (18, 34)],
    ),
    Left(
        "FLOPs of a round",
        "Table 12",
        "98.77 billion for LG-FedAvg, FedProto and FedTGP",
        "clients train alike by construction",
    ),
    Left("prototypes of peers and server", "Fig. 2", "—", "an illustration of the method"),
    Left("trainable vectors", "Fig. 3", "—", "an illustration of the method"),
    Left(
        "training error on Flowers102",
        "Fig. 4",
        "stable from round 100 on",
        "needs Flowers102 at the paper's size",
        [fedtgp.runs([], "practical-flowers102")],
    ),
    Left("t-SNE of prototypes", "Fig. 5", "within the peers' range", "a picture; margins: Fig. 1"),
    Left("t-SNE of features", "Fig. 6", "classes apart", "a picture without a number"),
    *(Left("who has what", f"Fig. {n}", "—", "a setting: `p2pfl data show FILE --png`") for n in range(7, 12)),
)

DFML = (
    Left("what methods support", "Table 1", "—", "a list of properties"),
    Left("which differences methods support", "Table 2", "—", "a list of properties"),
    Left(
        "Caltech101, Pets, Cars, ResNets, IID and non-IID",
        "Table 5",
        "above in all cells; +27.24 on Caltech101, non-IID",
        "needs these datasets; priced at 64x64, as the paper does not say how large images are",
        [cell for iid in (False, True) for cell in dfml.cells(dfml.RESNET, dfml.large(64), iid=iid, batch=16)],
    ),
    Left(
        "Pets and Cars, EfficientNets",
        "Table 7",
        "+27.60 and +38.80, non-IID",
        "needs these datasets; see the settings",
        dfml.cells(dfml.EFFICIENTNET, dfml.large(224)[1:], batch=8),
    ),
    Left("architectures", "Table 10", "—", "a setting: `p2pfl models`"),
    Left("the framework", "Fig. 2", "—", "an illustration of the method"),
    Left("α and peak models", "Fig. 3", "—", "an illustration; Fig. 8 has it as a number"),
    Left(
        "IID data",
        "Fig. 9",
        "cyclic α above a fixed one",
        PAPER_SIZE_ONLY,
        dfml.cells(dfml.RESTRICTED[:1], ("cifar100",), dfml.FIG_9, iid=True),
    ),
    Left(
        "IID data, here and in Tables 4, 5 (Fashion-MNIST), 7, 11, 12",
        "Table 3",
        "above in all cells",
        PAPER_SIZE_ONLY,
        dfml.IID_CELLS,
    ),
    Left(
        "CIFAR-100, non-IID, here and in Tables 4, 11, 12, and in Table 6 with 10 and 100 peers, IID or not",
        "Table 3",
        "above in all cells",
        "needs CIFAR-100",
        dfml.CIFAR_100_CELLS,
    ),
    Left(
        "ResNets and ViTs, CIFAR-10, non-IID",
        "Table 4",
        "above in all cells",
        COVERED,
        dfml.cells(dfml.RESTRICTED[1:]),
    ),
    Left(
        "500 rounds of FedAvg",
        "Table 8",
        "20 to 190",
        "the runs of Table 6 have it",
        dfml.cells(dfml.TABLE_6, dfml.BOTH),
    ),
    Left(
        "ResNets and ViTs, non-IID",
        "Table 9",
        "a cyclic α gains 22.29 and 8.32 with cross-entropy, 15.36 and 3.52 with WSM; WSM, then, 5.20 and 6.22",
        "needs CIFAR-100",
        dfml.cells(dfml.RESTRICTED[1:], ("cifar100",), dfml.TABLE_9),
    ),
    Left(
        "IID data",
        "Table 9",
        "a cyclic α gains in all cells; WSM, then, +0.16 with CNNs, −1.97 with ResNets, −0.14 with ViTs",
        "needs CIFAR-100",
        dfml.cells(dfml.RESTRICTED, ("cifar100",), dfml.TABLE_9, iid=True),
    ),
    Left(
        "K beyond 10",
        "Fig. 22",
        "hardly faster",
        "only at the paper's size; priced for K = 10 and 20",
        dfml.cells(("n50-niid",), methods=dfml.MORE_EPOCHS),
    ),
    Left("partitions", "Fig. 10", "—", "a setting: `p2pfl data show FILE --png`"),
    Left("α over rounds", "Fig. 11", "—", "a setting; tests hold the formula"),
    Left(
        "DFML close to FedAvg with a server",
        "Fig. 12",
        '"challenges the centralized FedAvg", without a number',
        "no threshold to test; `fedavg` has no WSM",
    ),
    Left(
        "50 and 100 peers, here and in Fig. 17",
        "Fig. 18",
        "local accuracy above decentralized FedAvg's; faster",
        "the runs of Table 6 have it",
        dfml.cells(dfml.TABLE_6[2:], dfml.BOTH),
    ),
    Left(
        "10 % senders",
        "Fig. 19",
        "above decentralized FedAvg; both slower than with 50 %",
        "10 % of ten peers is one; priced for 50",
        dfml.cells(("n50-niid",), methods=dfml.FEWER_SENDERS),
    ),
    Left("another topology", "Fig. 23", "—", "a setting: graph `bridge`"),
)

FEDSTYLE = (
    Left(
        "Office-Home and Adaptiope, one peer per style",
        "Table 1",
        "SimCLR: +0.8 and +1.5 in generalization, +1.2 and +1.9 in personalization; "
        "SimSiam: +3.4 and +0.4, +2.0 and +2.4",
        "needs these datasets",
        fedstyle.cells(fedstyle.FEDAVG, fedstyle.ONE),
    ),
    Left(
        "the gain on SVHN",
        "Table 1",
        "SimCLR +0.7 and +2.8, SimSiam +1.9 and +0.3",
        "needs SVHN",
        fedstyle.cells(fedstyle.FEDAVG, ("digits-1",)),
    ),
    Left(
        "above all methods, digits with SVHN",
        "Table 1",
        "SimCLR: +0.3 in generalization, +0.9 above the best in personalization; SimSiam: +0.9 and +0.1",
        "needs SVHN",
        fedstyle.cells((*fedstyle.FEDAVG, *fedstyle.OTHERS), ("digits-1",)),
    ),
    Left(
        "above centralized training, SimCLR", "Table 1", "−0.2 in generalization, FedAvg −0.5, digits", "not a claim"
    ),
    Left(
        "above the other methods, Office-Home and Adaptiope",
        "Table 1",
        "SimCLR +0.6 and +1.5, SimSiam +1.9 and +1.3 above the best of them in personalization; "
        "in Table 2 above all of them too",
        "needs these datasets",
        [
            *fedstyle.cells(fedstyle.OTHERS, fedstyle.ONE),
            *fedstyle.cells(fedstyle.OTHERS, fedstyle.FIVE, fedstyle.ALL),
        ],
    ),
    Left(
        "five peers per style",
        "Table 2",
        "SimCLR: +1.2 and +0.7 in generalization, +1.4 and +0.6 in personalization; "
        "SimSiam: +0.4 and +0.7, +0.7 and +1.4",
        "needs Office-Home and Adaptiope",
        fedstyle.cells(fedstyle.FEDAVG, fedstyle.FIVE, fedstyle.ALL),
    ),
    Left(
        "above the other methods, IID and β = 0.8",
        "Table 3",
        "SimCLR +0.4 and +0.6, SimSiam +0.5 and +0.1 above the best of them in personalization",
        PAPER_SIZE_ONLY,
        fedstyle.cells(fedstyle.OTHERS, ("digits-10",), ("IID", "β = 0.8")),
    ),
    Left(
        "above FedRep with SimCLR and FedPer with SimSiam, β = 0.2",
        "Table 3",
        "−0.0 and −0.3 (54.8 against 54.9, 57.9 against 58.2)",
        "not a claim: the paper itself has FedStyle below",
    ),
    Left(
        "above all methods, digits with SVHN, means of IID, β = 0.2 and β = 0.8",
        "Table 3",
        "SimCLR: +0.4 in generalization, +0.5 above the best in personalization; SimSiam: +0.3 and +0.4",
        "needs SVHN",
        fedstyle.cells((*fedstyle.FEDAVG, *fedstyle.OTHERS), ("digits-10",), fedstyle.ALL),
    ),
    Left("datasets", "Table 5", "—", "a setting"),
    Left("styles of users", "Fig. 1", "—", "an illustration"),
    Left("infusion of style", "Fig. 2", "—", "an illustration"),
    Left("the process", "Fig. 3", "—", "an illustration of the method"),
    Left("t-SNE of style features", "Fig. 4", "peers apart, alike in all settings", "a picture without a number"),
    Left("partitions", "Fig. 5", "—", "a setting: `p2pfl data show FILE --png`"),
)
