"""The file of ``--hosts``: a list of hosts.

- alpha                               # a name for ssh: from ~/.ssh/config, DNS, or user@host
- name: beta
  address: 10.0.0.2                   # what the other hosts connect to; default: what ssh has connected to
  python: /opt/p2pfl/bin/python       # the Python that has p2pfl; default: the path of the launcher's
  folder: /scratch/run1               # run folder there; default: the launcher's path, or --host-dir
  slots: 4                            # peers that compute at the same time; default: as the run file says
  gpus: [0, 1]                        # only these; default: all, [] none
  peers: 0-6                          # default: by weight, after those that are named
  weight: 2                           # default: slots, or cores
  environment: {P2PFL_DATA: /data}    # variables of the host process
  ssh: [-p, "2222"]                   # further options of ssh
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from launcher.backends.hosts import Host
from launcher.errors import LaunchError
from p2pfl import PeerId


def read_hosts(path: Path) -> tuple[list[Host], dict[str, list[str]]]:
    """Read a hosts file. Return the hosts, and their options of ssh by name. Raises LaunchError with all problems."""
    try:
        text = path.read_text(encoding="utf-8")
        entries, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise LaunchError(f"{path}: cannot be read: {reason}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise LaunchError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(entries, list) or not entries or not isinstance(node, yaml.SequenceNode):
        raise LaunchError(f"{path}: should be a list of hosts: names, or mappings with `name`")
    hosts: list[Host] = []
    options: dict[str, list[str]] = {}
    problems: list[str] = []
    for entry, place in zip(entries, node.value, strict=True):
        where = f"{path}:{place.start_mark.line + 1}"
        given = {"name": entry} if isinstance(entry, str) else entry
        wrong = list(_problems(given))
        if not wrong and any(host.name == given["name"] for host in hosts):
            wrong = [f"host {given['name']} is listed twice"]
        problems += [f"{where}: {problem}" for problem in wrong]
        if not wrong:
            hosts.append(_host(given))
            options[given["name"]] = [str(option) for option in given.get("ssh", ())]
    if problems:
        raise LaunchError("\n".join(problems))
    return hosts, options


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and not value.startswith("-") and value.isprintable()


def _is_peers(value: Any) -> bool:
    try:
        return bool(_peers(value))
    except ValueError:
        return False


def _list_of(kind: type | tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_text, "a name, user@host or address"),
    "address": (_is_text, "a host name or address"),
    "python": (_is_text, "the path of a Python"),
    "folder": (_is_text, "the path of a folder"),
    "slots": (lambda value: isinstance(value, int) and value is not True and value > 0, "a positive whole number"),
    "gpus": (_list_of((int, str)), "a list of GPUs, e.g. [0, 1]"),
    "peers": (_is_peers, "peers, e.g. 3, 0-6 or [0, 2-4]"),
    "weight": (_is_number, "a number that is not negative"),
    "environment": (lambda value: isinstance(value, dict) and all(_is_name(name) for name in value), "a mapping"),
    "ssh": (_list_of((int, str)), "a list of options of ssh"),
}


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*", name) is not None


def _problems(given: Any) -> list[str]:
    if not isinstance(given, dict) or "name" not in given:
        return [f"{given!r} should be the name of a host, or a mapping with `name`"]
    found = []
    for key, value in given.items():
        if key not in KEYS:
            found.append(f"unknown key {key!r}; expected one of {', '.join(KEYS)}")
        elif not KEYS[key][0](value):
            found.append(f"{key}: {value!r} should be {KEYS[key][1]}")
    return found


def _host(given: Mapping[str, Any]) -> Host:
    environment = {name: str(value) for name, value in given.get("environment", {}).items()}
    if "gpus" in given:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, given["gpus"]))
    return Host(
        name=given["name"],
        address=given.get("address"),
        python=given.get("python", sys.executable),
        folder=given.get("folder"),
        weight=given.get("weight"),
        slots=given.get("slots"),
        peers=tuple(_peers(given.get("peers", []))),
        environment=environment,
    )


def _peers(value: Any) -> list[PeerId]:
    """Return the peers of ``3``, ``"0-6"`` or ``[0, "2-4"]``. Raises ValueError."""
    found: set[PeerId] = set()
    for item in value if isinstance(value, list) else [value]:
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", str(item))
        if match is None:
            raise ValueError(f"{item!r} names no peers")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(found)
