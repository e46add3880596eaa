"""Commands that describe what a run file can name: algorithms, models, graph, data."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from launcher.commands.group import FILE, JSON, PLUGINS, PNG, SETS, require_file
from launcher.formatting.console import echo, print_table

if TYPE_CHECKING:
    from p2pfl import PeerId
    from p2pfl.inputs import Kind
    from p2pfl.run_file.run import Run
    from p2pfl.run_folder.folder import RunFolder

MOST_WINDOWS = 12
"""Rows of a table over time."""


@click.command()
@click.argument("name", required=False)
@PLUGINS
@JSON
def algorithms(name: str | None, plugins: tuple[str, ...], as_json: bool) -> None:
    """List algorithms; with NAME, describe its hyper-parameters."""
    from launcher.views.describe import describe_algorithm
    from p2pfl.algorithms import ALGORITHMS
    from p2pfl.options import unknown
    from p2pfl.run_file.load import load_plugins

    load_plugins(plugins)
    if name is not None and name not in ALGORITHMS:
        raise click.BadParameter(unknown(name, ALGORITHMS), param_hint="NAME")
    described = [describe_algorithm(algorithm) for algorithm in ([name] if name else ALGORITHMS)]
    if as_json:
        echo(json.dumps(described[0] if name else described))
        return
    for algorithm in described:
        echo(f": {algorithm['title']}", prefix=click.style(algorithm["name"], bold=True))
        echo(f"    {algorithm['summary']}")
        if paper := ", ".join(algorithm[key] for key in ("authors", "venue", "url") if algorithm[key] != "—"):
            echo(f"    {paper}")
        if name:
            echo()
            _print_notes("hyper-parameter", algorithm["hyper"])


def _print_notes(what: str, notes: list[dict[str, Any]]) -> None:
    """Print a table of options; their defaults as in a run file: null, true, [0.1, 1]."""
    rows = []
    for note in notes:
        default = note["default"]
        shown = default if isinstance(default, str) else json.dumps(default, default=str)
        rows.append([note["name"], note["type"], shown, note["text"]])
    if rows:
        print_table([what, "type", "default", "description"], rows)


@click.command()
@click.argument("kind", required=False)
@click.argument("name", required=False)
@PLUGINS
@JSON
def names(kind: str | None, name: str | None, plugins: tuple[str, ...], as_json: bool) -> None:
    """List all names that a run file can use.

    With KIND (algorithm, dataset, partition, augmentation, graph, model, backbone, head, metric, loss), describe
    those of this kind; with NAME too, its parameters.
    """
    from launcher.views.names import FAMILIES, describe_kind, describe_name, find_kind, kinds
    from p2pfl.options import OptionErrors
    from p2pfl.run_file.load import load_plugins

    load_plugins(plugins)
    try:
        found: Any = kinds() if kind is None else describe_kind(find_kind(kind))
        if kind is not None and name is not None:
            found = describe_name(find_kind(kind), name)
    except OptionErrors as error:
        hint = "KIND" if name is None else "NAME"
        raise click.BadParameter("; ".join(problem.message for problem in error.problems), param_hint=hint) from None
    if as_json:
        echo(json.dumps(found, default=str))
    elif kind is None:
        print_table(["kind", "in a run file", "names"], [[k["kind"], k["key"], ", ".join(k["names"])] for k in found])
        echo(
            f"models can also be {', '.join(FAMILIES)}, with other numbers, or an import path such as "
            "my_nets.Net(width=32)"
        )
    elif name is None:
        print_table(["name", "description"], [[each["name"], each["summary"]] for each in found])
    else:
        echo(f": {found['summary']}", prefix=click.style(found["name"], bold=True))
        _print_notes("parameter", found["parameters"])


def _numbers(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    """Parse ``32`` or ``28x32``."""
    numbers = tuple(int(part) for part in text.split("x") if part.isascii() and part.isdigit() and int(part))
    if len(numbers) != text.count("x") + 1:
        raise click.BadParameter(f"{text!r} is not a number, nor two such as 28x32")
    return numbers


@click.command()
@click.argument("name", required=False)
@click.option(
    "--inputs",
    type=click.Choice(["images", "series", "vectors", "tokens"]),
    default="images",
    show_default=True,
    help="Kind of the inputs.",
)
@click.option(
    "--channels",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Channels of images and series, numbers in a vector, size of the vocabulary of tokens.",
)
@click.option(
    "--size",
    callback=_numbers,
    default="32",
    show_default=True,
    metavar="N|HxW",
    help="Height and width of images in pixels, length of series and of sequences of tokens.",
)
@click.option("--classes", type=click.IntRange(min=1), default=10, show_default=True, help="Number of classes.")
@click.option("--features", type=click.IntRange(min=1), help="Number of features d; overrides the group's.")
@PLUGINS
@JSON
def models(
    name: str | None,
    inputs: Kind,
    channels: int,
    size: tuple[int, ...],
    classes: int,
    features: int | None,
    plugins: tuple[str, ...],
    as_json: bool,
) -> None:
    """List models and their costs; with NAME, of one group or model.

    FLOPs are of the forward pass of one input. The last columns are the bytes that a peer sends: for the whole
    model, for its head, or for a prototype of each class.
    """
    from launcher.views.describe import describe_models
    from p2pfl.inputs import size_of
    from p2pfl.models import MODELS, groups, unknown_model
    from p2pfl.run_file.load import load_plugins

    load_plugins(plugins, [name] if name else [])
    if name is not None and name not in MODELS:
        raise click.BadParameter(unknown_model(name), param_hint="NAME")
    grouped = {member for group in groups().values() for member in group.members}
    names = [name] if name else [model for model in MODELS if model not in grouped]
    try:
        shape = size_of(inputs, size)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--size") from None
    described = describe_models(names, channels, shape, classes, features)
    if as_json:
        echo(json.dumps(described[0] if name else described))
        return
    rows = []
    for group in described:
        for number, member in enumerate(group["members"]):
            rows.append([group["name"] if number == 0 else "", member["name"], *_cost_columns(member)])
    print_table(["group", "model", "parameters", "d", "FLOPs", "model", "head", "prototypes"], rows)
    for reason in {member["error"] for group in described for member in group["members"] if "error" in member}:
        echo(f"unsupported: {reason}", err=True)


def _cost_columns(cost: dict[str, Any]) -> list[str]:
    from launcher.formatting import count, size

    if "error" in cost:
        return ["–"] * 6
    numbers = [count(cost["parameters"]), str(cost["features"]), count(cost["flops"])]
    return numbers + [size(cost[f"{payload}_bytes"]) for payload in ("model", "head", "prototype")]


@click.command()
@click.argument("file", metavar="FILE|RUN", type=click.Path(path_type=Path), callback=require_file)
@SETS
@PNG
@click.option(
    "--window",
    type=click.IntRange(min=1),
    help="Of a time-varying graph: rounds of whose product the spectral gap is shown. Default: its period, or 10.",
)
@JSON
def graph(file: Path, sets: tuple[str, ...], png: Path | None, window: int | None, as_json: bool) -> None:
    """Describe the graph of a run: degrees, diameter, spectral gap.

    A picture shows the groups of the data partition in colors and, of the folder of a run whose method has mixing
    weights, those after the last complete round as edges. Of a time-varying graph, edges and degrees are those of its
    connections, the union over all rounds, and the picture shows the spectral gap over time.

    If FILE names attackers or a rule of aggregation: how many attackers each honest peer has among its neighbors, and
    how many its rule withstands, as it is set and at most. Of a time-varying graph, the worst round counts.
    """
    from launcher.report.drawings import draw_over_time
    from launcher.views.describe import describe_attackers, describe_graph, describe_over_time
    from p2pfl.run_file.load import load
    from p2pfl.run_folder.folder import RunFolder

    folder = RunFolder.open(file).require_local() if file.is_dir() else None
    run = load(file if folder is None else folder.run_file, sets)
    if window is not None and run.schedule is None:
        raise click.BadParameter(f"the graph {run.file.graph.name!r} does not change", param_hint="--window")
    described = describe_graph(run.topology)
    if run.schedule is not None:
        described["over_time"] = describe_over_time(run.schedule, run.rounds, window)
    attacked = describe_attackers(run)
    if attacked:
        described["attackers"] = attacked
    if png is not None:
        if run.schedule is None:
            _draw_graph(run, folder, png, attacked.get("attacks", ()))
        else:
            draw_over_time(described["over_time"], png)
        echo(f"wrote {png}", err=True)
    if as_json:
        echo(json.dumps(described))
        return
    if run.schedule is not None:
        _print_over_time(described)
    else:
        _print_static(described)
    if attacked:
        _print_attackers(attacked)


def _print_static(described: dict[str, Any]) -> None:
    degree, diameter = described["degree"], described["diameter"]
    if diameter is None:
        diameter = f"infinite ({described['components']} components)"
    echo(f"peers         {described['peers']}")
    echo(f"edges         {described['edges']}")
    echo(f"degree        {degree['min']} to {degree['max']}, mean {degree['mean']:.2f}")
    echo(f"diameter      {diameter}")
    echo(f"spectral gap  {described['spectral_gap']:.4f}")


def _print_attackers(attacked: dict[str, Any]) -> None:
    """Print how many attackers honest peers have among their neighbors, and how many their rule withstands."""
    from launcher.formatting import peers
    from launcher.views.describe import attackers_rows
    from launcher.views.print_summary import attackers_text

    if attacked["attacks"]:
        echo(f"attackers     {attackers_text(attacked['attacks'])}")
    echo(f"aggregation   {attacked['aggregation']}; attackers among the neighbors of each honest peer:")
    print_table(["peers", "neighbors", "attackers", "withstands", "at most", ""], attackers_rows(attacked))
    lost = [found["peer"] for found in attacked["peers"] if found["attackers"] > found["withstands"]]
    if lost:
        verb = "has" if len(lost) == 1 else "have"
        echo(f"{peers(lost)} {verb} more attackers among the neighbors than the aggregation withstands")


def _draw_graph(run: Run, folder: RunFolder | None, file: Path, attackers: Collection[PeerId]) -> None:
    """Draw the graph, with groups if the data is on this host, and the weights of a run if there are any."""
    from launcher.report.drawings import draw_graph
    from p2pfl.api import RecordedRun
    from p2pfl.errors import MissingExtra, RunFileError, RunFolderError
    from p2pfl.session.build import load_data

    groups = weights = None
    try:
        if run.file.data.download:  # do not download a dataset for a picture
            data = run.file.data.model_copy(update={"download": False})
            run = replace(run, file=run.file.model_copy(update={"data": data}))
        groups = [subset.group for subset in load_data(run)[1]]
    except (RunFileError, MissingExtra) as error:
        echo(f"without colors of groups, because the data is not available: {error}", err=True)
    if folder is not None:
        try:
            weights = RecordedRun(folder).graph()
        except RunFolderError as error:
            echo(f"without weights: {error}", err=True)
        if weights is not None and (present := len(list(folder.peers()))) != run.peers:  # started separately
            echo(f"without weights: {folder.root} has the files of {present} of {run.peers} peers", err=True)
            weights = None
    draw_graph(run.topology, file, groups, weights, attackers)


def _print_over_time(described: dict[str, Any]) -> None:
    """Print what a time-varying graph costs, and its spectral gap over time."""
    found, degree = described["over_time"], described["degree"]
    sent, edges, gaps, window = found["sent"], found["edges"], found["gap"], found["window"]
    period = "" if found["period"] is None else f", repeated after {found['period']}"
    parts = "" if described["components"] == 1 else f"; {described['components']} components"
    echo(f"peers         {described['peers']}")
    echo(f"rounds        {found['rounds']}{period}")
    echo(f"connections   {described['edges']}, {degree['min']} to {degree['max']} of a peer{parts}")
    echo(f"edges         {edges['min']} to {edges['max']} in a round, mean {edges['mean']:.2f}")
    echo(f"sent          {sent['min']} to {sent['max']} messages of a peer in a round, mean {sent['mean']:.2f}")
    echo(f"spectral gap  {min(gaps):.4f} to {max(gaps):.4f} of a round, mean {fmean(gaps):.4f}")
    rows = [
        [f"{start}–{start + window - 1}", f"{gap:.4f}"]
        for start, gap in zip(found["starts"], found["window_gap"], strict=True)
    ]
    shown = rows if len(rows) <= MOST_WINDOWS else [*rows[: MOST_WINDOWS - 1], ["…", ""], rows[-1]]
    print_table(["rounds", "spectral gap of their product"], shown)


@click.group()
def data() -> None:
    """Show how a dataset is partitioned among the peers."""


@data.command("show")
@FILE
@SETS
@PNG
@JSON
def show_data(file: Path, sets: tuple[str, ...], png: Path | None, as_json: bool) -> None:
    """Show the samples of each peer of FILE, a run file or run folder: split sizes and classes.

    Consecutive peers with equal numbers share a row. Then come the names of the classes, if they have any.
    """
    from launcher.report.drawings import draw_partition
    from launcher.views.partition import class_rows, describe, rows
    from p2pfl.run_file.load import load
    from p2pfl.run_folder.folder import RunFolder
    from p2pfl.session.build import check_models, load_data

    run = load(RunFolder.open(file).require_local().run_file if file.is_dir() else file, sets)
    loaded = load_data(run)
    for remark in check_models(run, *loaded):
        echo(f"warning: {remark}", err=True)
    described = describe(run, *loaded)
    if png is not None:
        draw_partition(described, png)
        echo(f"wrote {png}", err=True)
    if as_json:
        echo(json.dumps(described))
        return
    dataset = described["dataset"]
    echo(
        f"{dataset['name']}: {dataset['train']} training and {dataset['test']} test {dataset['inputs']}, "
        f"{dataset['classes']} classes; "
        f"partition {described['partition']['name']}"
    )
    print_table(["peer", "group", "train", "val", "test", "training samples by class"], rows(described))
    total = described["total"]
    echo(
        f"{total['train']} training samples in all peers, {total['distinct']} distinct; "
        f"{total['min']} to {total['max']} per peer, {total['mean']:.1f} on average"
    )
    if named := class_rows(dataset):
        print_table(["class", "name", "training", "test"], named)
    for note in dataset["notes"]:
        echo(f"note: {note}")
