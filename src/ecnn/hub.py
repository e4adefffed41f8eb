"""Models for other collections: the Hugging Face hub's folder layout, and an entry in RobustBench's manner."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

import ecnn
from ecnn import files, runs
from ecnn.auditing import load_audit
from ecnn.checks import check_choice
from ecnn.errors import InputError
from ecnn.exporting import Exported, about_lines, class_lines, input_lines
from ecnn.models import describe_model
from ecnn.predicting import CONFIG, CONFIG_FORMAT, CONFIG_VERSION, Classifier, Prediction, load_classifier
from ecnn.training.checkpoints import load_checkpoint, model_tensors, save_checkpoint
from ecnn.training.loop import BEST

#: Formats that are folders.
FOLDERS = ("huggingface", "robustbench")
CARD, AUDIT = "README.md", "audit.json"
_HEADER = "---\nlibrary_name: ecnn\npipeline_tag: image-classification\ntags:\n- ecnn\n- adversarial-robustness\n---\n"


class _WithoutHub:
    """What stands in for huggingface_hub's mixin where that is not installed: folders, but no names."""

    def save_pretrained(self, save_directory: Path) -> None:
        self._save_pretrained(save_directory)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str) -> Any:
        if not files.is_folder(pretrained_model_name_or_path):
            raise InputError(
                f"{pretrained_model_name_or_path} is no folder, and to fetch a model by its name the package "
                "huggingface_hub is needed: pip install 'ecnn[hub]'."
            )
        return cls._from_pretrained(model_id=pretrained_model_name_or_path)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        raise InputError(
            f"to send a model to {repo_id} the package huggingface_hub is needed: pip install 'ecnn[hub]'."
        )

    def _save_pretrained(self, save_directory: Path) -> None:
        raise NotImplementedError

    @classmethod
    def _from_pretrained(cls, *, model_id: str) -> Any:
        raise NotImplementedError


def _mixin() -> Any:
    try:
        return importlib.import_module("huggingface_hub").ModelHubMixin
    except ImportError:
        return _WithoutHub


class PretrainedModel(nn.Module, _mixin()):  # type: ignore[misc]
    """A trained model with the names of its classes, saved, loaded and shared as Hugging Face's tools do it.

    `from_run(RUN)` makes one, `save_pretrained(folder)` writes it, `from_pretrained(folder)` reads it. With the package
    huggingface_hub, `push_to_hub("name/model")` sends it and `from_pretrained("name/model")` fetches it. The files are
    config.json, model.safetensors and README.md; none of them can run code.

    Args:
        model: from pixels (batch, channel, height, width) in [0, 1] to scores, of a kind that has a name here.
        class_names, in_channels, image_size: as in `Classifier`.
        card: Markdown for people, which becomes README.md.
        facts: best_epoch and best_accuracy of its training, if known.
    """

    def __init__(
        self,
        model: nn.Module,
        class_names: Sequence[str],
        in_channels: int,
        image_size: Sequence[int],
        card: str = _HEADER,
        facts: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.card = model.eval(), card
        self.class_names, self.in_channels = tuple(class_names), in_channels
        self.image_size = (image_size[0], image_size[1])
        known = facts or {}
        self.facts = {"best_epoch": known.get("best_epoch", -1), "best_accuracy": known.get("best_accuracy")}

    @classmethod
    def from_run(cls, source: str | os.PathLike[str]) -> Self:
        """The model of a run folder, or a shipped one."""
        found = load_classifier(source)
        _, facts = load_checkpoint(runs.run_folder(source) / BEST)
        return cls(
            found.model, found.class_names, found.in_channels, found.image_size, _card_of_run(source), facts
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.model(images)
        return scores

    def predict(self, images: Any, **options: Any) -> list[Prediction]:
        """One prediction per image, see `Classifier.predict`."""
        classifier = Classifier(self.model, self.class_names, self.in_channels, self.image_size)
        return classifier.predict(images, **options)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> Any:
        """Writes config.json, model.safetensors and README.md.

        Args:
            options: of huggingface_hub's method of this name, such as push_to_hub=True.
        """
        names = (CONFIG, BEST, CARD)
        files.check_replaceable(save_directory, CONFIG, CONFIG_FORMAT, names)
        for name in names:
            files.check_writable(Path(save_directory) / name)
        return super().save_pretrained(Path(save_directory), **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """The model in a folder or, with the package huggingface_hub, the one of that name.

        Args:
            options: of huggingface_hub's method of this name, such as revision= and token=.
        """
        source = os.fspath(pretrained_model_name_or_path)
        if files.is_folder(source):
            return cls._from_pretrained(model_id=source)
        try:
            made: Self = super().from_pretrained(source, **options)
        except InputError:
            raise
        except (OSError, ValueError) as error:  # no such name, no network, not allowed
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise InputError(
                f"{source} is no folder and cannot be fetched by this name: {reason}."
            ) from error
        return made

    def _save_pretrained(self, save_directory: Path) -> None:
        form = (self.in_channels, *self.image_size)
        described = describe_model(self.model, len(self.class_names), form)
        if described is None:
            raise InputError(
                f"no file can describe this {type(self.model).__name__}: models and trunks of your own stay in Python."
            )
        config = {
            "format": CONFIG_FORMAT,
            "version": CONFIG_VERSION,
            "made_by": f"ecnn {ecnn.__version__}",
            "class_names": list(self.class_names),
            "in_channels": self.in_channels,
            "image_size": list(self.image_size),
            "model": described,
        }
        save_checkpoint(save_directory / BEST, model_tensors(self.model), {**self.facts, "model": described})
        files.write_text(save_directory / CARD, self.card)
        files.write_json(save_directory / CONFIG, config)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> Self:
        folder = Path(model_id) if files.is_folder(model_id) else _fetch(model_id, options)
        found = load_classifier(folder)
        card = _HEADER
        if files.exists(folder / CARD):
            card = files.read_bytes(folder / CARD, most=files.MAX_JSON_BYTES).decode(errors="replace")
        _, facts = load_checkpoint(folder / BEST)
        return cls(found.model, found.class_names, found.in_channels, found.image_size, card, facts)


def _fetch(name: str, options: dict[str, Any]) -> Path:
    """The folder that huggingface_hub fetches the files of that name into."""
    known = ("revision", "cache_dir", "force_download", "local_files_only", "token")
    chosen = {key: options[key] for key in known if key in options}
    hub: Any = importlib.import_module("huggingface_hub")
    return Path(hub.snapshot_download(name, allow_patterns=[CONFIG, BEST, CARD], **chosen))


def _card_of_run(source: str | os.PathLike[str]) -> str:
    classifier = load_classifier(source)
    lines = [
        *about_lines(source, runs.run_folder(source).resolve().name),
        "",
        "## How to use it",
        "",
        *input_lines(classifier),
        "",
        "```python",
        "from ecnn.hub import PretrainedModel",
        "",
        'model = PretrainedModel.from_pretrained("this folder, or its name on the hub")',
        'print(model.predict("picture.png")[0].name)',
        "```",
        "",
        *class_lines(classifier),
    ]
    return _HEADER + "\n" + "\n".join(lines)


def export_folder(source: str | os.PathLike[str], out: str | os.PathLike[str], *, format: str) -> Exported:
    """Writes the model of a run folder, or a shipped one, as a folder for another collection of models.

    Args:
        out: the folder.
        format: "huggingface", as `PretrainedModel.save_pretrained`; or "robustbench", the same and two files that are
            called as the folder: a module whose `load_model()` returns the network, and a model_info JSON with the
            threat model, the accuracy and what the run's audit left of it.
    """
    check_choice("format", format, FOLDERS)
    folder = Path(out)
    name = re.sub(r"\W", "_", folder.resolve().name)
    name = name if name.isidentifier() else f"model_{name}"
    texts = {}
    if format == "robustbench":
        texts = {f"{name}.py": _module(source, name), f"{name}.json": _model_info(source, name)}
    files.check_replaceable(folder, CONFIG, CONFIG_FORMAT, tuple(texts))
    for target in texts:
        files.check_writable(folder / target)
    PretrainedModel.from_run(source).save_pretrained(folder)
    for target, text in texts.items():
        files.write_text(folder / target, text)
    return Exported(folder, folder / CARD, format)


_MODULE = """{quotes}{name}: {what}.

Written by ecnn {version}; needs ecnn and the files beside it. What is known of it is in {name}.json.
{quotes}

from pathlib import Path

import ecnn
import shlex


def load_model():
    {quotes}The network in eval mode: float pixels (batch, {form}) in [0, 1] to scores (batch, class).{quotes}
    return ecnn.load_model(Path(__file__).parent)
"""


def _module(source: str | os.PathLike[str], name: str) -> str:
    found = load_classifier(source)
    form = ", ".join(map(str, (found.in_channels, *found.image_size)))
    return _MODULE.format(quotes=3 * '"', name=name, what=_what(source), version=ecnn.__version__, form=form)


def _model_info(source: str | os.PathLike[str], name: str) -> str:
    """JSON with the entries of RobustBench's model_info files, and what our audit says besides.

    "external" is there the accuracy under the strongest known attack: the audited one.
    """
    folder = runs.run_folder(source)
    if not files.exists(folder / AUDIT):
        raise InputError(
            f"an entry states what attacks leave, but {folder} has no {AUDIT}: run ecnn audit "
            f"{shlex.quote(str(source))} --eps ... --out {shlex.quote(str(folder))} first."
        )
    found = load_audit(folder)
    info = {
        "link": None,
        "name": name,
        "authors": None,
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": runs.read_spec(source).data.name,
        "venue": None,
        "architecture": _what(source),
        "eps": _fraction(found.eps),
        "clean_acc": _percent(found.clean_accuracy),
        "reported": None if found.claimed is None else _percent(found.claimed),
        "autoattack_acc": None,
        "external": _percent(found.accuracy),
        "unreliable": found.exit_code != 0,
        "footnote": f"All figures are of {found.images} images. External is what the adaptive audit of ecnn "
        f"{ecnn.__version__} left. {found.reason}",
        "threat_model": found.norm.capitalize(),
        "images": found.images,
        "external_interval": [_percent(end) for end in found.interval],
        "audit_verdict": found.verdict,
        "audit_version": found.audit_version,
    }
    return json.dumps(info, indent=2) + "\n"


def _what(source: str | os.PathLike[str]) -> str:
    """The network in a few words."""
    model: Any = load_classifier(source).model
    kind, code = runs.read_spec(source).model.get("kind", "ecnn"), getattr(model, "code", None)
    members = "" if code is None else f", {code.code_length} members"
    return f"{kind}{members}, {sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _fraction(eps: float) -> str:
    """The radius as people write it: "8/255" or "0.12"."""
    steps = round(255 * eps)
    return f"{steps}/255" if steps and abs(255 * eps - steps) < 1e-6 else f"{eps:g}"
