"""Writes an HTML report on one or several run folders."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ecnn import files, runs
from ecnn.attacks.norms import NORMS
from ecnn.auditing.report import RESULT
from ecnn.checks import check_choice, check_count, parse_eps
from ecnn.codes import CodeMatrix
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation.provenance import check_is_of
from ecnn.evaluation.records import FOLDER
from ecnn.pipeline.threads import suitable_threads
from ecnn.pipeline.training import AnyPath, load_test_images
from ecnn.progress import Milestone, Progress
from ecnn.report import RunContents, RunReport, radius_of, read_runs, report_page, take_samples

FORMATS = ("html",)


def write_report(
    sources: Sequence[AnyPath],
    out: AnyPath,
    *,
    format: str = "html",
    images: int = 32,
    norm: str | None = None,
    eps: float | str | None = None,
    seed: int = 0,
    root: AnyPath = "data",
    device: str = "auto",
    progress: Progress | None = None,
) -> Path:
    """Writes one self-contained page on one or several runs, and returns its path.

    Args:
        sources: run folders, or names of shipped models.
        out: the file.
        format: "html".
        images: how many test images are attacked for pictures and curves; 0 leaves these out.
        norm, eps: of the ball in which they are attacked; None for those of the run's audit, training or first recorded
            attack, in this order. A norm needs eps.
        seed: of these attacks.
        root: where dataset files are.
        device: auto, cpu, cuda, mps.
    """
    check_choice("format", format, FORMATS)
    check_choice(f"the suffix of {out}, which is HTML,", Path(out).suffix.lower(), (".html", ".htm"))
    check_count("images", images, least=0)
    if norm is not None:
        check_choice("norm", norm, NORMS)
        if eps is None:
            raise InputError(f"a norm needs its radius: give eps in {norm} too.")
    if not sources:
        raise InputError("give at least one run folder or name of a model.")
    files.check_writable(out)
    place, reports = runs.find_device(device), []
    for one in read_runs(sources):
        own_norm, radius = radius_of(one)
        ball = (norm or own_norm, radius)
        if eps is not None:
            ball = (ball[0], parse_eps(eps, most=NORMS[ball[0]].longest))
        model = runs.load_model(one.source, device=place)
        if one.audit is not None:
            check_is_of(one.folder / RESULT, one.audit.model, model)
        if one.evaluation is not None:
            check_is_of(one.folder / FOLDER, one.evaluation.clean.about.get("model", {}), model)
        code = getattr(model, "code", None)
        if one.code is None and isinstance(code, CodeMatrix):  # its kind has a fixed code, which no run saves
            one = dataclasses.replace(one, code=code)
        reports.append(_report(one, model, ball, images, seed, root, _naming(one.name, progress)))
    elsewhere = None if str(root) == "data" else root
    given = {"--out": out, "--images": images, "--norm": norm, "--eps": eps}
    given |= {"--seed": seed or None, "--root": elsewhere}
    words = [str(word) for flag in given.items() if flag[1] is not None for word in flag]
    again = shlex.join(["ecnn", "report", *map(str, sources), *words])
    return files.write_text(out, report_page(reports, again=again))


def _report(
    contents: RunContents,
    model: nn.Module,
    ball: tuple[str, float],
    images: int,
    seed: int,
    root: AnyPath,
    progress: Progress | None,
) -> RunReport:
    """The report on one run, with attacks on a few images if these can be loaded.

    Args:
        ball: norm and radius within which the images are attacked.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    split: Split | None = None
    absence = "No images were attacked for this report, because none were requested."
    if images:
        try:
            split = load_test_images(contents.spec, root)
        except InputError as error:
            absence = f"Curves and pictures that need images are left out: {error}"
    if split is None:
        return RunReport(contents, parameters, None, absence)
    norm, eps = ball
    with suitable_threads(model, split):
        samples = take_samples(
            model,
            split,
            norm=norm,
            eps=eps,
            limit=min(images, len(split)),
            seed=seed,
            progress=progress,
        )
    return RunReport(contents, parameters, samples)


def _naming(name: str, progress: Progress | None) -> Progress | None:
    """A progress that puts the name of the run before each message; None for None."""
    if progress is None:
        return None

    def tell(done: int, total: int, news: str) -> None:
        text = f"{name}: {news}"
        progress(done, total, Milestone(text) if isinstance(news, Milestone) else text)

    return tell
