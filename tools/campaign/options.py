"""Runs commands with random options: they must end with a known status, and report errors in a sentence."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from campaign.forks import Violation, command, in_child
from campaign.scene import Scene, broken_files
from ecnn.cli import app

_NUMBERS = (
    "0", "-1", "1", "2", "3", "7", "1000", "100000", "2147483648", "9223372036854775808", "18446744073709551616",
    "9" * 400, "1e308", "-1e308", "1e-320", "0.5", "nan", "inf", "-inf", "1/0", "8/255", "0/0", "1e5000", "٣", "0x10",
    "1_0", "½",
)  # fmt: skip
_TEXTS = (
    "", " ", "x", "-", "--", "é", "😀", "\udcff\udcfe", "a" * 300, "b" * 5000, "a\nb", "%s{}", "None", "true", "[]",
    "{}", "2000-01-01", "../..", ".", "~", "pgd", "ecnn", "linf", "l2", "members", "cuda", "cuda:99", "mps", "meta",
    "cpu:1", "10x30", "digits", "mnist", "gtsrb", "cifar10-adp", "small", "paper", "trades", "best", "last", "train",
    "quick", "thorough", "one",
)  # fmt: skip
#: Paths in the folder of a case, to be read or written. No path outside it is ever given as a place to write to.
_PATHS = (
    "run", "run/spec.toml", "code.json", "table.toml", "table", "nowhere", "nowhere/x.json", "x.png", "x.pdf", "x.npz",
    "fifo", "fifo.png", "null", "loop", "here", "sock.json", "run/model.safetensors", "nothing.toml", "noise.json",
    "many.json", "deep.json", "digits.json", "deep.toml", "model.py:net", "model.py:fails", "model.py:one",
    "model.py:wrong", "broken.py:net", "model.py:", "code.json:x", "😀/x.json", "bad\udcff.json", "a" * 300 + ".json",
)  # fmt: skip
_READ_ONLY = ("/dev/zero", "/dev/null", "/dev/urandom", "/dev/full", "/proc/self/mem", "/", "/etc")
_KEYS = (
    "seed", "data.name", "data.val_fraction", "data.test_limit", "data.image_size", "data.num_classes",
    "data.fingerprint", "code.name", "code.code_length", "code.arity", "code.steps", "code.doubled", "model.kind",
    "model.width", "model.depth", "model.share_trunk", "model.feature_dim", "model.activation", "train.recipe",
    "train.lr", "train.epochs", "train.batch_size", "train.weight_decay", "train.optimizer", "train.schedule",
    "train.ema", "train.precision", "train.attack", "train.attack.eps", "train.attack.steps", "train.attack.norm",
    "train.objective", "train.diversity_weight", "train.crop", "objective.beta", "attack.restarts", "attack.steps",
    "attack.eps", "attack.loss", "attack.targets", "attack.on", "attack.step_size", "audit.eps", "attacks.pgd.eps",
    "nothing", "a.b.c.d", "", ".", "seed.x",
)  # fmt: skip
_PROGRAM = """
import torch
def net(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
def fails(): raise RuntimeError("a mistake of the user's")
def wrong(): return torch.nn.Linear(5, 3)
one = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
"""
#: Options that decide how much work is done: a command with them may take long, but Ctrl-C must end it.
_WORK = (
    "--epochs", "--steps", "--chains", "--seconds", "--limit", "--attack-steps", "--set", "--length", "--classes",
    "--arity", "--budget", "--attack", "--model", "--image-size", "--data", "--recipe", "--jobs", "--stage", "--init",
    "--spec", "--column-weight", "--objective",
)  # fmt: skip
_WRITTEN = ("--out", "--plot", "--save-images")
_PATIENCE = 4.0


def try_options(scene: Scene, number: int, rng: random.Random) -> Iterator[tuple[str, list[Violation]]]:
    """Runs five commands that work, each with one to three options changed, added or left out."""
    with scene.folder_from(scene.done) as folder:
        _put_traps(folder)
        for _ in range(5):
            words = _words(scene, rng)
            is_long = any(word in _WORK for word in words)
            ended = in_child(command(*words), folder=folder, interrupt_after=_PATIENCE if is_long else None)
            found = [one for one in ended.violations() if one.kind != "traceback" or "--module" not in words]
            if not _traps_stand(folder):
                found.append(Violation("lost", "something that is no file of ours was replaced"))
            found += broken_files(folder / "run") if (folder / "run").is_dir() else []
            yield "ecnn " + " ".join(word[:60] for word in words).replace("\n", " "), found
            if found:  # the folder may be damaged for the commands after it
                return


def _put_traps(folder: Path) -> None:
    """Creates files that a careless program waits for, replaces or trusts: pipes, a device, links, wrong contents."""
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "fifo.png")
    try:
        os.mknod(folder / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError:  # only root can create devices
        os.mkfifo(folder / "null")
    (folder / "loop").symlink_to("loop")
    (folder / "here").symlink_to(".")
    (folder / "sock.json").symlink_to("run/code.json")
    (folder / "nothing.toml").write_text("")
    (folder / "noise.json").write_bytes(random.Random(0).randbytes(999))
    (folder / "many.json").write_text(
        '{"format": "ecnn-code", "version": 1, "arity": 2, "symbols": %s}' % ([[0, 1]] * 9)
    )
    (folder / "deep.json").write_text("[" * 50_000)
    (folder / "digits.json").write_text("9" * 6000)
    (folder / "deep.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
    (folder / "model.py").write_text(_PROGRAM)
    (folder / "broken.py").write_text("def net(:\n")


def _traps_stand(folder: Path) -> bool:
    """Whether the device, the pipes and the links have not been replaced by files."""
    null = (folder / "null").lstat().st_mode
    return (
        stat.S_ISFIFO((folder / "fifo").lstat().st_mode)
        and stat.S_ISFIFO((folder / "fifo.png").lstat().st_mode)
        and not stat.S_ISREG(null)
        and all((folder / name).is_symlink() for name in ("loop", "here", "sock.json"))
    )


def _words(scene: Scene, rng: random.Random) -> list[str]:
    data = ["--data", str(scene.pictures)]
    train = [
        "train",
        *data,
        "--image-size",
        "8",
        "--epochs",
        "1",
        "--batch-size",
        "16",
        "--set",
        "model.depth=8",
    ]
    attack = [
        "evaluate",
        "run",
        *data,
        "--attack",
        "pgd",
        "--eps",
        "0.1",
        "--steps",
        "1",
        "--step-size",
        "0.1",
    ]
    bases = [
        ["code", "--classes", "3", "--length", "5", "--steps", "50"],
        ["code", "--show", "code.json"],
        [*train, "--set", "model.width=2", "--out", "new"],
        [*train, "--dry-run"],
        ["train", "--spec", "run/spec.toml", "--epochs", "1", "--dry-run"],
        [*attack, "--limit", "4"],
        ["audit", "run", *data, "--eps", "0.1", "--budget", "quick", "--limit", "3", "--dry-run"],
        ["audit", "--module", "model.py:net", *data, "--eps", "0.1", "--limit", "2", "--dry-run"],
        ["reproduce", "table.toml", "--out", "table", "--table"],
        ["reproduce", "table.toml", "--out", "table", "--dry-run"],
        ["predict", "run", str(scene.pictures / "test/0/0.png")],
        ["predict", "run", rng.choice((*_PATHS, *_READ_ONLY)), "--top", "2"],
        ["export", "run", "--out", "model.pt2"],
        ["report", "run", "--images", "2", "--out", "report.html"],
        ["data", str(scene.pictures)],
        ["data"],
        ["models"],
        ["doctor"],
    ]
    words = list(rng.choice(bases))
    options = _options_of(words[0])
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.1:
            del words[rng.randrange(1, len(words) + 1) - 1 if len(words) > 1 else 0]
            if not words:
                return [rng.choice(_TEXTS)]
            continue
        name, takes_value = rng.choice(options)
        where = words.index(name) if name in words else None
        if not takes_value:
            words.append(name)
            continue
        value = _value(name, rng)
        if where is not None and where + 1 < len(words):
            words[where + 1] = value
        else:
            words += [name, value] if rng.random() < 0.7 else [f"{name}={value}"]
    if rng.random() < 0.1:
        words.insert(rng.randrange(1, len(words) + 1), rng.choice((*_TEXTS, *_NUMBERS)))
    return [word for word in words if "\0" not in word and not _writes_outside(word)]


def _writes_outside(word: str) -> bool:
    """Whether the word is an option that would make the command write outside its folder."""
    name, _, value = word.partition("=")
    return name in _WRITTEN and bool(value) and (value.startswith(("/", "~")) or ".." in value)


def _value(name: str, rng: random.Random) -> str:
    if name in _WRITTEN:
        # A user who names a file of the run as the output wants it replaced: that is no violation to look for.
        return rng.choice([path for path in _PATHS if not path.startswith("run/")])
    if name == "--set":
        return f"{rng.choice(_KEYS)}{rng.choice(('=', '=', '=', '=', ''))}{rng.choice((*_NUMBERS, *_TEXTS, *_PATHS))}"
    kinds = (_NUMBERS, _NUMBERS, _TEXTS, _PATHS, _READ_ONLY)
    return rng.choice(rng.choice(kinds))


def _options_of(name: str) -> list[tuple[str, bool]]:
    """The options of a command, and whether each takes a value; without --debug, which prints tracebacks on purpose."""
    found: Any = typer.main.get_command(app)
    options = [option for option in found.commands[name].params if option.opts[0].startswith("-")]
    every = [
        (flag, not option.is_flag) for option in options for flag in (*option.opts, *option.secondary_opts)
    ]
    return [(flag, takes_value) for flag, takes_value in every if flag != "--debug"]
