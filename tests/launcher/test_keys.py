"""`p2pfl keys new`, and a launch that lacks them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest


def test_keys_for_a_number_of_peers(tmp_path, invoke, capfd):
    folder = tmp_path / "keys"
    outcome = invoke("keys", "new", 12, "--into", folder)
    assert outcome.exit_code == 0
    assert outcome.stdout == (
        f"{folder}: 12 private keys, and {folder}/public.yaml with their public keys\n"
        f"in the run file: transport: {{keys: {folder}}}\n"
    )
    assert sorted(path.name for path in folder.glob("*.key")) == [f"{peer:02d}.key" for peer in range(12)]
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key")} == {0o600}
    public = (folder / "public.yaml").read_text().splitlines()
    assert [re.sub("[0-9a-f]{64}$", "…", line) for line in public] == [f"{peer}: …" for peer in range(12)]
    private = [path.read_text().strip() for path in folder.glob("*.key")]
    assert len({*private, *(line[-64:] for line in public)}) == 24
    said = outcome.output + "".join(capfd.readouterr())
    assert not any(key in said for key in private)


def test_keys_for_a_run_file_that_asks_for_them(file, tmp_path, invoke):
    file.write_text(file.read_text() + "transport: {host: 0.0.0.0}\n")
    assert invoke("keys", "new", file, "--into", tmp_path / "keys").exit_code == 0
    assert len(list((tmp_path / "keys").glob("*.key"))) == 3


def test_each_host_makes_the_keys_of_its_own_peers(tmp_path, invoke):
    for host, peers in (("a", (0, 2)), ("b", (1,))):
        chosen = [argument for peer in peers for argument in ("--peer", peer)]
        assert invoke("keys", "new", 3, "--into", tmp_path / host, *chosen).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["00.key", "02.key", "public.yaml"]
    assert [line[:2] for line in (tmp_path / "b" / "public.yaml").read_text().splitlines()] == ["1:"]


def test_keys_are_not_overwritten(tmp_path, invoke, capfd):
    assert invoke("keys", "new", 2, "--into", tmp_path / "keys").exit_code == 0
    before = (tmp_path / "keys" / "00.key").read_text()
    outcome = invoke("keys", "new", 2, "--into", tmp_path / "keys")
    assert outcome.exit_code == 1
    assert "keys: not empty; keys are not overwritten: give a new folder" in capfd.readouterr().err
    assert (tmp_path / "keys" / "00.key").read_text() == before


def test_a_folder_for_each_peer(tmp_path, invoke):
    folder = tmp_path / "keys"
    outcome = invoke("keys", "new", 3, "--into", folder, "--apart")
    assert outcome.stdout == f"{folder}: 3 private keys, and the public keys of all beside each\n"
    assert sorted(str(path.relative_to(folder)) for path in folder.glob("*/*")) == [
        name for peer in ("00", "01", "02") for name in (f"{peer}/{peer}.key", f"{peer}/public.yaml")
    ]
    before = {path: path.read_bytes() for path in folder.glob("*/*")}
    outcome = invoke("keys", "new", 3, "--into", folder, "--apart", "--owner", os.geteuid())
    assert outcome.stdout == f"{folder}: 0 private keys, and the public keys of all beside each; 3 were there\n"
    assert {path: path.read_bytes() for path in folder.glob("*/*")} == before


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["--owner", "root"], "--owner goes with --apart"), (["--apart", "--owner", "no-such-user"], "no user")],
)
def test_owners_that_will_not_do(tmp_path, invoke, arguments, problem):
    outcome = invoke("keys", "new", 3, "--into", tmp_path / "keys", *arguments)
    assert outcome.exit_code == 2
    assert problem in outcome.stderr
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("arguments", [[0], [2, "--peer", 2], ["nothing.yaml"]])
def test_keys_for_nobody(tmp_path, invoke, arguments):
    assert invoke("keys", "new", *arguments, "--into", tmp_path / "keys").exit_code == 2
    assert not (tmp_path / "keys").exists()


def test_keys_are_made_without_torch(tmp_path):
    code = (
        "import sys\nfrom peers.keys import main\nassert main(sys.argv[1:]) == 0\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "keys"), "0"], check=True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda keys: keys.joinpath("01.key").unlink(), r"01\.key: not there; copy it to the host where peer 1 runs"),
        (lambda keys: keys.joinpath("01.key").chmod(0o640), r"01\.key: mode 0640 lets others at this private key"),
        (lambda keys: keys.joinpath("public.yaml").write_text(""), r"public\.yaml: no key of peer 0, 1, 2"),
        (
            lambda keys: keys.joinpath("01.key").write_text(keys.joinpath("02.key").read_text()),
            r"01\.key: not the private key that belongs to public key [0-9a-f]{12}… of peer 1",
        ),
    ],
)
def test_a_launch_without_the_keys_it_needs_starts_nothing(file, tmp_path, invoke, change, problem):
    folder = tmp_path / "keys"
    assert invoke("keys", "new", 3, "--into", folder).exit_code == 0
    change(folder)
    file.write_text(file.read_text() + f"transport:\n  keys: {folder}\n")
    outcome = invoke("launch", file)
    assert outcome.exit_code == 2
    assert re.match(rf"error: {file}:9: transport\.keys: {folder}/{problem}", outcome.stderr)
    assert not (tmp_path / "runs").exists()
