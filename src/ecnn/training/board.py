"""TensorBoard events beside train.jsonl, if TensorBoard is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ecnn import files

FOLDER = "tensorboard"


class Board:
    """Writes a file of TensorBoard events for each start or continuation of a training, if TensorBoard is installed.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER
        self._writer: Any = None

    def show(self, record: dict[str, Any]) -> None:
        """Adds the numbers of an epoch; they are on disk when this returns.

        The first call hides the events of this epoch and later ones that an earlier start has written.

        Args:
            record: of the epoch, as in train.jsonl.
        """
        if importlib.util.find_spec("tensorboard") is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        with files.naming(self.folder, "write"):
            if self._writer is None:
                self._writer = SummaryWriter(str(self.folder), purge_step=record["epoch"])
            for key, value in record.items():
                if key != "epoch":
                    self._writer.add_scalar(key, value, record["epoch"])
            self._writer.flush()

    def close(self) -> None:
        """Closes the file, if one was begun."""
        if self._writer is not None:
            with files.naming(self.folder, "write"):
                self._writer.close()
