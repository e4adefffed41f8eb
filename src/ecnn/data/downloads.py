"""Download of official archives through pooch, and unpacking that cannot write outside the target folder."""

from __future__ import annotations

import importlib
import logging
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ecnn import files
from ecnn.errors import InputError
from ecnn.progress import Progress

_TIMEOUT_SECONDS = 30
_MAX_UNPACKED_BYTES = 4 * 2**30
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Archive:
    """An official file to download.

    Attributes:
        url: address of the file.
        sha256: checksum that it must have.
        folder: folder below the root that it is put into, or unpacked into.
        provides: files below the root that are there afterwards.
        unpack: whether it is a .tar.gz or .zip to unpack; otherwise it is used as it is.
    """

    url: str
    sha256: str
    folder: str
    provides: tuple[str, ...]
    unpack: bool = True

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[1]

    def missing(self, root: Path) -> Path | None:
        """The first of its files that is missing, or None; an unpacked `x` will do in place of `x.gz`."""
        for relative in self.provides:
            if not files.exists(root / relative) and not files.exists(root / relative.removesuffix(".gz")):
                return root / relative
        return None


def provide(
    name: str, archives: tuple[Archive, ...], root: Path, download: bool, progress: Progress | None
) -> None:
    """Downloads the archives whose files are missing; InputError if that fails, with the file and its address."""
    for archive in archives:
        missing = archive.missing(root)
        if missing is None:
            continue
        verb = "unpack it in" if archive.unpack else "put it in"
        by_hand = f"fetch {archive.url} yourself and {verb} {root / archive.folder}"
        if not download:
            raise InputError(f"{name} needs {missing}, which is not there: pass download=True, or {by_hand}.")
        try:
            pooch: Any = importlib.import_module("pooch")
        except ImportError as error:
            raise InputError(
                f"{name} needs {missing}, and downloading it needs the package pooch: install that, or {by_hand}."
            ) from error
        try:
            _download(pooch, archive, root, progress)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        except (OSError, ValueError) as error:  # pooch raises ValueError for a wrong checksum
            reason = "wrong checksum" if isinstance(error, ValueError) else type(error).__name__
            raise InputError(
                f"{name} needs {missing}, and downloading it failed ({reason}): {by_hand}."
            ) from error
        still_missing = archive.missing(root)
        if still_missing is not None:
            raise InputError(f"{name} needs {still_missing}, which {archive.url} does not contain.")


def unpack(archive: Path, folder: Path) -> None:
    """Puts the files of a .tar.gz or .zip below a folder, once all of them could be read.

    Only plain files whose names stay inside the folder are accepted: no links, devices, absolute names or "..".
    """
    with files.temporary_folder(folder / "unpacked") as temporary:
        written = []
        left = _MAX_UNPACKED_BYTES
        try:
            for member, content in _plain_files(archive):
                target = (temporary / member).resolve()
                if not target.is_relative_to(temporary) or ".." in PurePosixPath(member).parts:
                    raise InputError(
                        f"{archive} is refused: its entry {member!r} leads outside of its folder."
                    )
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("wb") as out:
                    while part := content.read(min(_CHUNK_BYTES, left + 1)):
                        left -= out.write(part)
                        if left < 0:
                            raise InputError(
                                f"{archive} is refused: it holds more than {_MAX_UNPACKED_BYTES >> 30} GiB."
                            )
                written.append(target.relative_to(temporary))
        except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise InputError(f"{archive} is not a whole archive: {error}.") from error
        for relative in written:
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (temporary / relative).replace(folder / relative)


def _plain_files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                if not info.is_dir():
                    yield info.filename, opened.open(info)
        return
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise InputError(
                    f"{archive} is refused: its entry {member.name!r} is a link or a device, not a file."
                )
            yield member.name, content


class _Bar:
    """Stands in for pooch's progress bar and passes its calls on to our `progress`."""

    def __init__(self, progress: Progress, what: str) -> None:
        self.total = 0  # pooch sets it from the server's answer
        self._done, self._progress, self._what = 0, progress, what

    def update(self, size: int) -> None:
        self._done = min(self._done + size, self.total) if self.total else self._done + size
        self._progress(self._done, max(self.total, self._done), self._what)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        pass


def _download(pooch: Any, archive: Archive, root: Path, progress: Progress | None) -> None:
    logger: logging.Logger = pooch.get_logger()
    level = logger.level
    folder = root if archive.unpack else root / archive.folder
    bar = False if progress is None else _Bar(progress, f"downloading {archive.file_name}")
    logger.setLevel(logging.ERROR)  # rooms do not print
    new = [place for place in (folder, *folder.parents) if not files.exists(place)]
    try:
        path = pooch.retrieve(
            archive.url,
            known_hash=f"sha256:{archive.sha256}",
            fname=archive.file_name,
            path=folder,
            downloader=pooch.HTTPDownloader(progressbar=bar, chunk_size=2**16, timeout=_TIMEOUT_SECONDS),
        )
    except BaseException:
        for place in new:  # a mistyped root leaves no folder behind
            with suppress(OSError):
                place.rmdir()
        raise
    finally:
        logger.setLevel(level)
    if archive.unpack:
        unpack(Path(path), root / archive.folder)
        Path(path).unlink()
