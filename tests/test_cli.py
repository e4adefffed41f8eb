"""The command line as a person uses it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ecnn_command

import ecnn
from ecnn.cli import app
from ecnn.codes import CodeMatrix, load_code


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(ecnn_command("", *arguments), capture_output=True, text=True, cwd=cwd, check=False)


def test_design_prints_figures_beside_bounds_and_writes_files(tmp_path: Path) -> None:
    files = ("--out", "sub/code.json", "--plot", "code.png")
    done = run("code", "--classes", "10", "--length", "30", "--steps", "400000", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("10 classes x 30 binary tasks")
    assert lines[1].split()[-2:] == ["16", "16"]
    assert lines[-2:] == ["wrote sub/code.json", "wrote code.png"]
    code = load_code(tmp_path / "sub" / "code.json")
    assert code.min_row_distance == 16
    assert (tmp_path / "code.png").read_bytes().startswith(b"\x89PNG")
    shown = run("code", "--show", "sub/code.json", cwd=tmp_path)
    assert shown.stdout.splitlines()[:6] == lines[:6]
    assert "".join(map(str, code.symbols[0])) in shown.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code.png", "sub"]


def test_json_is_one_object(tmp_path: Path) -> None:
    done = run(
        "code", "--classes", "6", "--length", "8", "--arity", "3", "--seed", "4", "--steps", "20000", "--json"
    )
    value = json.loads(done.stdout)
    code = CodeMatrix(value["symbols"], value["arity"])
    assert (value["num_classes"], value["code_length"], value["arity"], value["seed"]) == (6, 8, 3, 4)
    assert value["min_row_distance"] == code.min_row_distance <= value["min_row_distance_bound"]
    assert value["min_column_distance"] == pytest.approx(code.min_column_distance)
    assert value["energy"] == pytest.approx(code.energy(value["column_weight"]))
    assert value["hash"] == code.content_hash
    assert 0 < value["proposals"] <= 20000
    assert value["seconds"] > 0
    assert value["stopped_by"] == "steps"


def test_json_of_a_shipped_code() -> None:
    value = json.loads(run("code", "--show", "10x30", "--json").stdout)
    assert value["symbols"] == load_code("10x30").symbols.tolist()
    assert value["seconds"] is None
    assert value["seed"] == load_code("10x30").provenance["seed"]


def test_json_has_no_infinity(tmp_path: Path) -> None:
    done = run("code", "--classes", "2", "--length", "3", "--steps", "100", "--json")
    value = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert value["energy"] is None  # every question about two classes is the same


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give --classes and --length"),
        (("--classes", "10"), "give --classes and --length"),
        (("--classes", "9", "--length", "3"), "use a code_length of at least 4"),
        (("--classes", "1", "--length", "3"), "num_classes must be a whole number from 2 up, not 1"),
        (("--classes", "4", "--length", "4", "--column-weight", "lots"), "--column-weight must be"),
        (("--classes", "4", "--length", "4", "--seconds", "-1"), "seconds must be a number above 0"),
        (("--classes", "4", "--length", "4", "--plot", "x.bmp"), "must be one of .png"),
        (("--classes", "4", "--length", "4", "--out", "."), "it is a folder"),
        (("--classes", "4", "--length", "4", "--out", "file/x.json"), "not a folder"),
        (("--show", "11x11"), "must be one of 10x10"),
        (("--show", "missing.json"), "cannot read missing.json"),
        (("--show", "file"), "is not JSON"),
        (("--show", "symbol.json"), "row 0, task 1 is 7"),
        (("--show", "10x30", "--classes", "3"), "takes no --classes"),
        (("--classes", "4", "--length", "4", "--init", "10x30"), "init is 10 x 30"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(
    tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "file").write_text("not json")
    bad = {**CodeMatrix([[0, 1], [1, 0]]).to_dict(), "symbols": [[0, 7], [1, 0]]}
    (tmp_path / "symbol.json").write_text(json.dumps(bad))
    before = sorted(tmp_path.rglob("*"))
    done = run("code", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ecnn: ")
    assert len(done.stderr.splitlines()) == 1
    assert sentence in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_debug_shows_the_traceback() -> None:
    done = run("code", "--classes", "9", "--length", "3", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_unknown_options_and_values() -> None:
    for arguments in (("code", "--clases", "3"), ("code", "--objective", "beauty"), ("coed",)):
        done = run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path) -> None:
    command = ecnn_command(f"code --classes 30 --length 30 --steps {10**12} --out code.json")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may be deaf to it
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, before)
        time.sleep(8)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "interrupted" in out
    assert load_code(tmp_path / "code.json").provenance["stopped_by"] == "interrupt"


def test_version() -> None:
    assert run("--version").stdout == f"ecnn {ecnn.__version__}\n"


def flags() -> dict[str, list[str]]:
    """Every option of every command."""
    import typer.main

    group: Any = typer.main.get_command(app)
    return {
        name: sorted(
            option
            for parameter in command.params
            for option in parameter.opts
            if option.startswith("--") and not option.endswith("-completion")  # typer's own
        )
        for name, command in sorted({"": group, **group.commands}.items())
    }


def test_flags_change_on_purpose() -> None:
    assert flags() == json.loads((Path(__file__).parent / "cli_flags.json").read_text())
