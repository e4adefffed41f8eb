"""The command line as a person uses it: in a process of its own."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import ecnn_command
from test_data import write_pictures
from typer.testing import CliRunner

import ecnn
from ecnn.cli import app, doctor_command, serve_command
from ecnn.cli.statuses import with_status
from ecnn.codes import CodeMatrix, load_code
from ecnn.errors import InputError
from ecnn.models import MODELS


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
        (("--classes", "1", "--length", "3"), "num_classes must be a whole number from 2 to"),
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("report nowhere", "and a model by name must be one of"),
        ("report mnist-tanh16 --format pdf", "format must be html, not 'pdf'"),
        (
            "report mnist-tanh16 --out r.pdf",
            "the suffix of r.pdf, which is HTML, must be .html or .htm, not '.pdf'",
        ),
        ("report mnist-tanh16 --norm l2", "a norm needs its radius"),
        ("train --data digits --image-size 0", "image_size must be a number of pixels"),
        ("report mnist-tanh16 --eps 8", 'did you mean "8/255"'),
        ("report mnist-tanh16 --images -1", "images must be"),
        ("serve nothing", "and a model by name must be one of"),
        ("serve mnist-tanh16 --port 70000", "port must be"),
        ("serve mnist-tanh16 --host no.such.host.invalid", "cannot be listened at"),
        ("serve mnist-tanh16 --set limits.image=3", "did you mean 'images'"),
        ("serve mnist-tanh16 --set train.lr=3", "limits.NAME=VALUE"),
        ("serve mnist-tanh16 --compare cifar10-adp", "cannot be compared"),
    ],
)
def test_mistakes_with_a_model_are_a_sentence_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_command, "_examples", lambda model, root: None)  # which would be downloaded
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2, done.output
    assert done.stderr.splitlines()[-1].startswith("ecnn: ")
    assert sentence in done.stderr
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback() -> None:
    done = run("code", "--classes", "9", "--length", "3", "--debug")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1].startswith("ecnn: ")


class DivergedError(RuntimeError):
    """One of ours, as far as its name tells."""

    __module__ = "ecnn.training.loop"


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (InputError("give more."), 2, "give more."),
        (RuntimeError("no kernel\nand more"), 4, "RuntimeError: no kernel (--debug shows where)."),
        (RuntimeError(), 4, "the machine or the model failed: RuntimeError (--debug"),
        (MemoryError(), 4, "MemoryError"),
        (OSError(28, "No space left on device"), 4, "OSError: [Errno 28] No space left on device"),
        (RecursionError("x" * 9999), 4, "xxx..."),
        (SystemExit(1), 4, "SystemExit: 1"),  # a model's file that ends the process
        (typer.Exit(1), 4, "Exit"),
        (DivergedError("it diverged."), 4, "ecnn: it diverged."),
        (BrokenPipeError(), 141, ""),
        (KeyboardInterrupt(), 130, "interrupted. It is kept."),
    ],
)
def test_how_a_command_can_end(
    error: BaseException, status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what a command returns is a verdict."""

    def fails() -> int:
        error.add_note("It is kept.")
        raise error

    with pytest.raises(typer.Exit) as ended:
        with_status(fails)()
    said = capsys.readouterr().err
    assert ended.value.exit_code == status
    assert sentence in said
    assert len(said.splitlines()) == (status != 141)
    assert ("It is kept." in said) == (status in (4, 130))
    with pytest.raises(typer.Exit) as ended:
        with_status(fails)(debug=True)
    assert ended.value.exit_code == status
    assert (status == 141) != ("Traceback" in capsys.readouterr().err)
    for returned, expected in ((None, 0), (0, 0), (3, 3)):
        with pytest.raises(typer.Exit) as ended:
            with_status(lambda value=returned: value)()
        assert ended.value.exit_code == expected


def test_train_names_every_kind_of_model() -> None:
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).stdout
    assert set(MODELS) <= set(re.findall(r"\w+", shown))


def test_the_statuses_are_in_every_help() -> None:
    for command in flags():
        shown = CliRunner().invoke(app, [command, "--help"] if command else ["--help"]).stdout
        assert "4 a fault of the machine or the model" in " ".join(shown.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_nobody_reads_and_the_disk_is_full() -> None:
    """Neither ends in a traceback, nor in a status that means something else."""
    words = " ".join(ecnn_command("code --show 10x30"))
    for tail, status, said in (("| true", 141, ""), ("> /dev/full", 4, "No space left on device")):
        script = f"{words} {tail}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == bool(said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    ("words", "tail", "status"),
    [
        ("--help", "| true", 141),
        ("audit --help", "| true", 141),
        ("--help", "> /dev/full", 4),
        ("--version", "> /dev/full", 4),
        ("audit --bogus", "2> /dev/full", 2),
        ("coed", "2>&1 | true", 2),
        ("", "2> /dev/full", 2),
    ],
)
def test_what_no_command_prints_ends_like_one(words: str, tail: str, status: int) -> None:
    """Help, the version and mistakes on the command line: 1 would be the verdict of an audit."""
    script = f"{' '.join(ecnn_command(words))} {tail}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    said = ["ecnn: cannot write what was asked for: No space left on device."] if status == 4 else []
    assert done.stderr.splitlines() == said


def test_who_asks_for_what_typer_raises_gets_it() -> None:
    """As programs that run commands of others do."""
    with pytest.raises(Exception, match="No such option: --bogus"):
        typer.main.get_command(app)(["audit", "--bogus"], standalone_mode=False)
    assert typer.main.get_command(app)(["--version"], standalone_mode=False) == 0


@pytest.mark.parametrize(
    "words",
    [
        "code --show closed/x",
        "data closed/x",
        "data closed",
        "data --root closed/x",
        "train --data closed/x",
        "audit --module closed/own.py:build --data digits --eps 0.1",
        "audit --module own.py:build --data closed/x --eps 0.1",
        "audit --module own.py:build --data digits --eps 0.1 --out closed/x",
        "evaluate --module own.py:build --data digits --attack fgsm --out closed/x",
        "reproduce members --out closed/x --table",
        "predict closed/x own.py",
        "report closed",
    ],
)
@pytest.mark.parametrize("why", ["Permission denied", "File name too long"])
def test_a_path_that_may_not_be_looked_at_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, why: str
) -> None:
    """It is the caller's to mend, so no fault of the machine; and "not there" would be untrue."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("from torch import nn\nbuild = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))")
    closed = "closed" if why == "Permission denied" else "d" * 300
    look = os.stat

    def refuses(path: Any, **options: Any) -> os.stat_result:
        if "closed" in str(path).split(
            "/"
        ):  # root may look anywhere, and others cannot load what a command needs
            raise PermissionError(errno.EACCES, why, str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refuses)
    done = CliRunner().invoke(app, words.replace("closed", closed).split())
    assert done.exit_code == 2, done.output
    said = done.stderr.splitlines()[-1]
    assert re.fullmatch(rf"ecnn: cannot (read|write) {closed}[\w./-]*: {why}\.", said), said


def test_outputs_that_are_closed_or_of_another_encoding(tmp_path: Path) -> None:
    """As cron, services and old terminals have them."""
    show = ecnn_command("code --show 10x30")
    for tail in (">&-", ">&- 2>&- <&-"):
        done = subprocess.run(["bash", "-c", f"{' '.join(show)} {tail}"], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
    words = [*ecnn_command("code --classes 3 --length 4 --steps 9 --out"), "gr\u00fcn \u65e5.json"]
    variables = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(words, capture_output=True, check=False, env=variables, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"wrote gr\xfcn \\u65e5.json\n")


def test_unknown_options_and_values() -> None:
    for arguments in (("code", "--clases", "3"), ("code", "--objective", "beauty"), ("coed",)):
        done = run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path) -> None:
    """At a terminal, once its bar says how long it will take."""
    command = ecnn_command(f"code --classes 30 --length 30 --steps {10**12} --out code.json")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may be deaf to it
    terminal, its_end = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=its_end, text=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        os.close(its_end)
        shown = b""
        while not re.search(rb"\d:\d\d:\d\d", shown):
            shown += os.read(terminal, 4096)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    with suppress(OSError):  # which says that nobody writes any more
        while more := os.read(terminal, 4096):
            shown += more
    os.close(terminal)
    assert process.returncode == 130
    assert "interrupted" in out
    assert b"kept in code.json: --init code.json goes on" in shown
    assert load_code(tmp_path / "code.json").provenance["stopped_by"] == "interrupt"


def test_a_search_that_is_cut_short_replaces_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a longer one left stays; the best so far is written beside it."""
    cut = CodeMatrix(
        load_code("10x10").symbols, provenance={"stopped_by": "interrupt", "proposals": 0, "seed": 0}
    )
    monkeypatch.setattr(ecnn, "design_code", lambda *given, **settings: cut)
    out = tmp_path / "code.json"
    asked = ["code", "--classes", "10", "--length", "10", "--out", str(out)]
    assert CliRunner().invoke(app, asked).exit_code == 130
    assert load_code(out).content_hash == cut.content_hash
    load_code("10x30").save(out)
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 130
    assert f"kept in {tmp_path / 'code-interrupted.json'}" in done.output
    assert load_code(out).code_length == 30
    assert load_code(tmp_path / "code-interrupted.json").content_hash == cut.content_hash


def test_version() -> None:
    assert run("--version").stdout == f"ecnn {ecnn.__version__}\n"


def test_help_takes_less_than_four_tenths_of_a_second() -> None:
    """Of processor time, so that a busy machine does not matter."""
    spent = []
    for _ in range(2):
        before = os.times()
        done = run("--help")
        after = os.times()
        assert "Commands" in done.stdout
        spent.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(spent) < 0.4


def test_doctor_says_what_is_there_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    needed = [re.match(r"[\w-]+", entry)[0] for entry in listed["dependencies"]]  # type: ignore[index]
    assert {*needed} == {*doctor_command.REQUIRED, "numba"}
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["packages"]["torch"]
    assert found["devices"][0] == "cpu"
    assert found["threads"] >= 1
    monkeypatch.setattr(doctor_command, "_version", lambda name: None if name in ("rich", "onnx") else "1")
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 4
    assert "PROBLEM   rich is not installed: pip install rich." in done.stdout
    assert "PROBLEM   torch cannot be used" in done.stdout
    assert "absent    onnx: ecnn export" in done.stdout


def test_data_says_which_files_are_where(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    done = CliRunner().invoke(app, ["data", "--root", str(tmp_path), "--json"])
    found = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert [*found] == ["digits", "mnist", "cifar10", "cifar100", "gtsrb", "optprojtran"]
    assert found["digits"]["missing"] == []
    assert found["cifar10"]["missing"] == [str(tmp_path / "cifar-10-batches-py" / "data_batch_1")]
    assert found["cifar10"]["fetch"][0].endswith("cifar-10-python.tar.gz")
    assert len(found["mnist"]["missing"]) == 4
    for part in ("train", "test"):
        (tmp_path / "gtsrb").mkdir(exist_ok=True)
        (tmp_path / "gtsrb" / f"{part}.npz").write_bytes(b"")
    assert "gtsrb        there" in CliRunner().invoke(app, ["data", "--root", str(tmp_path)]).stdout


def test_data_reads_every_image_of_a_folder(tmp_path: Path) -> None:
    for layout in ("", "train", "test"):
        write_pictures(tmp_path / "own" / layout, {"stop": 3, "go": 2}, size=(6, 4))
        if layout == "":
            write_pictures(tmp_path / "own", {"yield": 1}, size=(6, 4))
            write_pictures(tmp_path / "own" / "stop", {"more": 2}, size=(6, 4))
            (tmp_path / "own" / "stop" / "3.heic").touch()
            (tmp_path / "own" / "labels.csv").touch()
            done = CliRunner().invoke(app, ["data", str(tmp_path / "own")])
            assert done.exit_code == 0
            assert done.stdout.splitlines()[1:] == [
                "        2  go",
                "        3  stop",
                "        1  yield",
                "height x width: 6 x 4 (6)",
                "not used: 1 .csv, 1 .heic, 1 folders",
                "classes with one image, for training, and none to test on: yield",
            ]
            shutil.rmtree(tmp_path / "own")
    (tmp_path / "own" / "test" / "go" / "000.png").write_bytes(b"broken")
    done = CliRunner().invoke(app, ["data", str(tmp_path / "own"), "--json"])
    assert done.exit_code == 2
    assert json.loads(done.stdout)["counts"] == {"go": 3, "stop": 6}
    assert json.loads(done.stdout)["left_out"] == {}
    assert "000.png cannot be read as an image" in done.stderr
    for wrong, sentence in (("digitz", "did you mean 'digits'"), ("mnist", "is a named dataset")):
        refused = CliRunner().invoke(app, ["data", wrong])
        assert refused.exit_code == 2
        assert sentence in refused.stderr


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_a_name_that_is_not_utf8_is_printed_as_it_is(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/bad\xff.json"
    words = [*ecnn_command("code --classes 3 --length 4 --steps 9 --out"), os.fsdecode(name)]
    done = subprocess.run(words, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"wrote " + name + b"\n")
