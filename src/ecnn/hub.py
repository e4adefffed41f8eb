"""Export to other collections of models: folders for the Hugging Face hub, and entries like RobustBench's."""

from __future__ import annotations

import hashlib
import importlib
import json
import keyword
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import ecnn
from ecnn import files, runs
from ecnn.auditing.report import RESULT, find_audit
from ecnn.checks import check_choice, eps_text
from ecnn.errors import InputError
from ecnn.exporting import Exported, about_lines, class_lines, input_lines
from ecnn.models import describe_model
from ecnn.predicting import (
    CONFIG_FORMAT,
    CONFIG_VERSION,
    Classifier,
    Prediction,
    ask_model,
    load_classifier,
)
from ecnn.runs import CONFIG
from ecnn.training.checkpoints import checkpoint_bytes, load_checkpoint, load_model_tensors, model_tensors
from ecnn.training.loop import BEST

#: Formats that are folders.
FOLDERS = ("huggingface", "robustbench")
CARD = "README.md"
_CARD_SUM = "card_sha256"
#: Entries of RobustBench's model_info that are for people to fill in.
_YOURS = ("link", "authors", "additional_data", "venue")
_HEADER = "---\nlibrary_name: ecnn\npipeline_tag: image-classification\ntags:\n- ecnn\n- adversarial-robustness\n---\n"


class _WithoutHub:
    """Replaces huggingface_hub's mixin where that is not installed: folders can be loaded, names on the hub cannot."""

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

    @classmethod
    def _from_pretrained(cls, *, model_id: str) -> Any:
        raise NotImplementedError


def _sum_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _mixin() -> Any:
    try:
        return importlib.import_module("huggingface_hub").ModelHubMixin
    except ImportError:
        return _WithoutHub


class PretrainedModel(nn.Module, _mixin()):  # type: ignore[misc]
    """A trained model with the names of its classes, saved, loaded and shared by Hugging Face's methods.

    `from_run(RUN)` makes one, `save_pretrained(folder)` writes it, `from_pretrained(folder)` reads it. With the package
    huggingface_hub, `push_to_hub("name/model")` sends it and `from_pretrained("name/model")` fetches it. The files are
    config.json, model.safetensors and README.md; none of them can run code.

    Args:
        model: from pixels (batch, channel, height, width) in [0, 1] to scores. Only kinds in `ecnn.models.MODELS` can
            be saved.
        class_names, in_channels, image_size: as in `Classifier`.
        card: the model card in Markdown, which becomes README.md.
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

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> Any:
        """Writes config.json, README.md and model.safetensors: all of them, or none.

        Args:
            push_to_hub: also send it to the hub.
            repo_id: its name there; None for the folder's name.
            options: of `push_to_hub`.
        """
        # Not by huggingface_hub's method, which removes config.json before it writes anything.
        self._save(Path(save_directory), {})
        if push_to_hub:
            return super().push_to_hub(repo_id or Path(save_directory).resolve().name, **options)
        return None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """The model in a folder or, with the package huggingface_hub, the model of that name on the hub.

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

    def _save(self, folder: Path, texts: Mapping[str, str]) -> None:
        """Writes the model's files and these texts by file name. InputError unless the files restore the same model."""
        names = (CONFIG, CARD, *texts, BEST)
        files.check_replaceable(folder, CONFIG, CONFIG_FORMAT, names)
        for name in names:
            files.check_writable(folder / name)
        self._check_card(folder)
        described = self._describe()
        config = {
            "format": CONFIG_FORMAT,
            "version": CONFIG_VERSION,
            "made_by": f"ecnn {ecnn.__version__}",
            "class_names": list(self.class_names),
            "in_channels": self.in_channels,
            "image_size": list(self.image_size),
            "model": described,
            _CARD_SUM: _sum_of(self.card),
        }
        weights = checkpoint_bytes(model_tensors(self.model), {**self.facts, "model": described})
        files.write_described(folder, (BEST, weights), (CONFIG, config), {CARD: self.card, **texts})

    def _check_card(self, folder: Path) -> None:
        """Raises InputError if somebody has changed the card that would be replaced."""
        if not files.exists(folder / CARD):
            return
        written = files.read_json(folder / CONFIG).get(_CARD_SUM)  # older exports lack it
        if written is not None and files.file_sum(folder / CARD) not in (written, _sum_of(self.card)):
            raise InputError(
                f"{folder / CARD} was changed after it had been exported, and would be replaced: move it away, or "
                "choose another folder."
            )

    def _describe(self) -> dict[str, Any]:
        """The description of the model in config.json. InputError unless it and the weights restore the model."""
        form = (self.in_channels, *self.image_size)
        described = describe_model(self.model, len(self.class_names), form)
        if described is None:
            raise InputError(
                f"no file can describe this {type(self.model).__name__}: models and trunks of your own stay in Python."
            )
        tensors = model_tensors(self.model)
        try:
            again = runs.model_for("its description", described, tensors)
            load_model_tensors(again, tensors, Path("its file of weights"))
            ask_model(again.eval(), torch.zeros(1, *form))
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"this model, with {len(self.class_names)} class_names for images of {'x'.join(map(str, form))}, could "
                f"not be loaded again: {error}"
            ) from error
        return described

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
    """Downloads the files of that name from the hub; returns the folder that they lie in."""
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
        "- `predict`, below, resizes images of other sizes whole, bilinearly.",
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
        format: "huggingface" for the files of `PretrainedModel.save_pretrained`. "robustbench" adds two files named
            after the folder: a module whose `load_model()` returns the network, and a model_info JSON with the threat
            model, the clean accuracy and the audited accuracy. It needs an audit in the run folder.
    """
    check_choice("format", format, FOLDERS)
    folder, texts = Path(out), {}
    if format == "robustbench":
        name = _module_name(folder)
        info = {**_model_info(source, name), **_filled_in(folder / f"{name}.json")}
        texts = {f"{name}.py": _module(source, name), f"{name}.json": json.dumps(info, indent=2) + "\n"}
    PretrainedModel.from_run(source)._save(folder, texts)
    return Exported(folder, folder / CARD, format)


def _module_name(folder: Path) -> str:
    """The folder's name as a module name, with "model_" before it if it is invalid or the name of another module."""
    name = re.sub(r"\W", "_", folder.resolve().name)
    taken = {"ecnn", *keyword.kwlist, *sys.stdlib_module_names, *packages_distributions()}
    return name if name.isidentifier() and name not in taken else f"model_{name}"


def _filled_in(path: Path) -> dict[str, Any]:
    """The entries that people have filled in by hand; they are kept when the model is exported again."""
    try:
        info = files.read_json(path)
    except InputError:
        return {}
    return {key: info[key] for key in _YOURS if info.get(key)} if isinstance(info, dict) else {}


_MODULE = """{quotes}{name}: {what}.

Written by ecnn {version}; needs ecnn and the files beside it. What is known of it is in {name}.json.
{quotes}

from pathlib import Path

import ecnn


def load_model():
    {quotes}The network in eval mode: float pixels (batch, {form}) in [0, 1] to scores (batch, class).{quotes}
    return ecnn.load_model(Path(__file__).parent)
"""


def _module(source: str | os.PathLike[str], name: str) -> str:
    found = load_classifier(source)
    form = ", ".join(map(str, (found.in_channels, *found.image_size)))
    return _MODULE.format(quotes=3 * '"', name=name, what=_what(source), version=ecnn.__version__, form=form)


def _model_info(source: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """The entries of a model_info file of RobustBench, and further ones on the audit.

    RobustBench calls the accuracy under the strongest known attack "external". Here it is the audited accuracy.
    """
    folder = runs.run_folder(source)
    found = find_audit(folder, load_classifier(source).model)
    if found is None:
        raise InputError(
            f"an entry states what attacks leave, but {folder} has no {RESULT}: run ecnn audit "
            f"{shlex.quote(str(source))} --eps ... --out {shlex.quote(str(folder))} first."
        )
    return {
        "link": None,
        "name": name,
        "authors": None,
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": runs.read_spec(source).data.name,
        "venue": None,
        "architecture": _what(source),
        "eps": eps_text(found.eps),
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


def _what(source: str | os.PathLike[str]) -> str:
    """The network in a few words: kind, number of members and of parameters."""
    model: Any = load_classifier(source).model
    kind, code = runs.read_spec(source).model.get("kind", "ecnn"), getattr(model, "code", None)
    members = "" if code is None else f", {code.code_length} members"
    return f"{kind}{members}, {sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"
