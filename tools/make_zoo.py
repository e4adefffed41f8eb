"""Adds a finished run to the shipped models, with weights in float16 where that changes no prediction.

Run: python tools/make_zoo.py RUN NAME "what it is, in a sentence"; needs the images in data/.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch

from ecnn import evaluate, files, load_model, runs
from ecnn.data import Split, load_data
from ecnn.objectives import predicted_classes
from ecnn.spec import make_attack
from ecnn.training.checkpoints import load_checkpoint, save_halved
from ecnn.training.loop import BEST, LOG

ROOT = Path(__file__).parents[1]
KEPT = (runs.SPEC, runs.CODE, runs.CLASSES, runs.ENVIRONMENT, LOG)
ATTACKED = 100  # test images, for the card
TRIED = 4  # of the largest tensors, which are tried in float16 one by one if not all tensors can be


def answers(folder: Path, split: Split) -> torch.Tensor:
    """(image,) predicted class of every image of the split."""
    model = load_model(folder)
    with torch.no_grad():
        return torch.cat([predicted_classes(model(split[i : i + 500][0])) for i in range(0, len(split), 500)])


def main(run: Path, name: str, what: str) -> None:
    """Writes the model's folder in the zoo, with a card of what is measured here."""
    spec = runs.read_spec(run)
    split = load_data(spec.data.name, ROOT / "data").test
    folder = ROOT / "src/ecnn/zoo" / name
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / name
        made.mkdir()
        for kept in KEPT:
            if (run / kept).exists():
                shutil.copyfile(run / kept, made / kept)
        result = runs.read_results(run)
        files.write_json(made / runs.RESULTS, {name: result[name] for name in ("test_accuracy", "images")})
        before = answers(run, split)
        halve(made, run / BEST, split, before)
        write_card(made, name, what, split, before)
        runs.finish_run(made)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)


def halve(made: Path, source: Path, split: Split, before: torch.Tensor) -> None:
    """Writes the weights with all tensors in float16, or else with those of the largest that change no prediction."""
    tensors, _ = load_checkpoint(source)
    largest = sorted(tensors, key=lambda name: -tensors[name].numel())[:TRIED]
    rounded: list[str] = []
    for only in (None, *largest):
        tried = None if only is None else [*rounded, only]
        save_halved(made / BEST, source, only=tried)
        differ = int((answers(made, split) != before).sum())
        print(f"{differ} of {len(split):,} answers differ with {only or 'all weights'} in float16")
        if not differ and tried is None:
            return
        rounded = rounded if differ or tried is None else tried
    save_halved(made / BEST, source, only=rounded)


def write_card(folder: Path, name: str, what: str, split: Split, answered: torch.Tensor) -> None:
    """Writes card.md: what the model is, how it was trained, its test accuracy, and its accuracy under two attacks."""
    spec, (_, facts) = runs.read_spec(folder), load_checkpoint(folder / BEST)
    result = runs.read_results(folder)
    assert round(float((answered == split.labels).double().mean()), 4) == round(result["test_accuracy"], 4)
    eps = 0.3 if spec.data.name == "mnist" else 0.04
    ball = {"norm": "linf", "eps": eps, "keep": "last"}
    has_members = hasattr(load_model(folder), "member_logits")
    on_logits = {"on": "linear" if has_members else "scores", "loss": "margin"}
    where = "on the member logits" if has_members else "with falling steps"
    attacks = {
        "scores": make_attack({"kind": "pgd", **ball, "steps": 200, "step_size": 0.02, "loss": "margin"}),
        "logits": make_attack(
            {**ball, "kind": "pgd", "steps": 50, "step_size": eps / 4, "schedule": "linear"} | on_logits
        ),
    }
    found = evaluate(load_model(folder), split, attacks, limit=ATTACKED, seed=0)
    left = {key: f"{100 * value:.0f} %" for key, value in found.accuracy_after.items()}
    parameters = sum(weight.numel() for weight in load_model(folder).parameters())
    chosen = f"epoch {facts['best_epoch'] + 1} of {spec.train['epochs']}, chosen on validation images"
    lines = [
        f"# {name}",
        "",
        what,
        "",
        f"- {parameters:,} parameters; {chosen} ({100 * facts['best_accuracy']:.2f} %).",
        f"- **Test accuracy {100 * result['test_accuracy']:.2f} %** on all {len(split):,} test images, float32.",
        f"- First {ATTACKED} test images, eps {eps}: PGD-200 with step 0.02 on the scores leaves {left['scores']},",
        f"  PGD-50 {where} {left['logits']}. docs/results.md says what stronger attacks leave.",
        "",
        f'Load it with `ecnn.load_model("{name}")`; `spec.toml` holds every setting, `train.jsonl` every epoch.',
    ]
    files.write_text(folder / "card.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
