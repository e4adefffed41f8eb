"""Serves a trained model over HTTP: an API that classifies and attacks pictures, and a web page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ecnn.errors import InputError
from ecnn.serving.limits import Limits
from ecnn.serving.subject import Subject, load_subject

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["Limits", "Subject", "load_subject", "make_app", "serve"]


def make_app(subject: Subject, **options: Any) -> FastAPI:
    """The ASGI application; see `ecnn.serving.app.make_app` for its options."""
    try:
        from ecnn.serving import app
    except ImportError as error:
        raise _missing(error) from None
    return app.make_app(subject, **options)


def serve(subject: Subject, **options: Any) -> None:
    """Serves the model until it is interrupted; see `ecnn.serving.server.serve` for the options."""
    try:
        from ecnn.serving import server
    except ImportError as error:
        raise _missing(error) from None
    server.serve(subject, **options)


def _missing(error: ImportError) -> InputError:
    return InputError(
        f'serving needs the package {error.name}, which is not installed: pip install "ecnn[serve]".'
    )
