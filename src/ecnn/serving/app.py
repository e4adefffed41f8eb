"""The ASGI application: routes that pass requests on to the workers, and the files of the web page."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

import ecnn
from ecnn.attacks import NORMS
from ecnn.checks import check_choice
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.predicting import check_has_code
from ecnn.serving import schema
from ecnn.serving.answers import answer
from ecnn.serving.attacking import offered, run_attack
from ecnn.serving.guard import Guard, Refusal, busy, ending
from ecnn.serving.limits import Limits
from ecnn.serving.pictures import read_pictures, to_png, too_many_images
from ecnn.serving.requests import (
    COMPARED,
    SERVED,
    AttackRequest,
    BodyError,
    attack_request,
    parse_form,
    parse_json,
    predict_request,
)
from ecnn.serving.subject import Subject
from ecnn.serving.workers import BatchingWorker, Ended, OutOfTime, TimedWorker

PREDICT, ATTACK = "/v1/predict", "/v1/attack"
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
}
_READERS = 2  # threads that decode images and JSON; more would only need more memory
_FIELDS = 16  # most fields of a form besides files
_EXAMPLES = 20


@dataclass(eq=False)
class Served:
    """A model with its two threads: one classifies with the model itself, one attacks a copy of it."""

    subject: Subject
    limits: Limits
    batches: BatchingWorker = field(init=False)
    attacks: TimedWorker = field(init=False)

    def __post_init__(self) -> None:
        model = self.subject.classifier.model
        # Copies the model, so it comes before the thread that uses the model.
        self.attacks = TimedWorker(model)
        self.batches = BatchingWorker(model, self.limits.batch_images)

    @property
    def is_alive(self) -> bool:
        """Whether both threads run and take work."""
        return self.batches.is_alive and self.attacks.is_alive

    def end(self) -> None:
        """Tells both threads to end, without waiting for them."""
        self.batches.end()
        self.attacks.end()

    def close(self) -> None:
        """Ends both threads, and waits for them."""
        self.batches.close()
        self.attacks.close()


@dataclass(eq=False)
class Service:
    """Everything that the routes need.

    Attributes:
        models: by the name that requests use for them, "served" or "compared".
        limits: beyond which requests are refused.
        about: the answer of `GET /v1/model`.
        examples: the answer of `GET /v1/examples`.
        readers: threads that decode requests, so that a slow one does not hold up the others.
    """

    models: Mapping[str, Served]
    limits: Limits
    about: dict[str, Any]
    examples: list[dict[str, Any]]
    readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_READERS, "ecnn-read"))

    def find(self, name: str) -> Served:
        """The model of that name; InputError if there is none."""
        check_choice("model", name, self.models)
        return self.models[name]

    async def unpack(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function in one of the `readers`, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, function, *arguments)

    def end(self) -> None:
        """Tells the threads of all models to end, without waiting for them; a running attack is stopped."""
        for served in self.models.values():
            served.end()

    def close(self) -> None:
        """Ends all threads, and waits for those of the models."""
        for served in self.models.values():
            served.close()
        self.readers.shutdown(wait=False, cancel_futures=True)


def make_app(
    subject: Subject,
    *,
    compare: Subject | None = None,
    examples: Split | None = None,
    limits: Limits | None = None,
    only_local: bool = True,
) -> FastAPI:
    """The ASGI application that serves a model.

    Args:
        subject: the model.
        compare: another model with the same form of images and the same classes, shown beside it.
        examples: test images, of which the page offers the first two of each class, 20 at most.
        limits: beyond which requests are refused; None for the defaults of `Limits`.
        only_local: refuses requests whose Host header is not a loopback address.
    """
    limits = limits or Limits()
    if compare is not None:
        subject.check_reads_as(compare)
    about = {
        "model": subject.to_dict(),
        "compared": None if compare is None else compare.to_dict(),
        "attacks": offered(),
        "norms": list(NORMS),
        "limits": dataclasses.asdict(limits),
        "version": ecnn.__version__,
    }
    models = {SERVED: Served(subject, limits)}
    if compare is not None:
        models[COMPARED] = Served(compare, limits)
    service = Service(models, limits, about, [] if examples is None else _examples(subject, examples))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="ecnn",
        version=ecnn.__version__,
        summary=f"Classify and attack pictures with {subject.name}.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    _add_handlers(app)
    _add_routes(app, service)
    _add_page(app)
    slots = {PREDICT: limits.requests, ATTACK: limits.attacks}
    app.add_middleware(Guard, limits=limits, only_local=only_local, slots=slots)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", summary="Whether the server works", **schema.HEALTH)
    async def health() -> Response:
        if not all(served.is_alive for served in service.models.values()):
            raise busy("a thread of the server has ended: start it again.")
        return JSONResponse({"status": "ok"})

    @app.get("/v1/model", summary="The model, its code, its audit, and the limits", **schema.MODEL)
    async def model() -> Response:
        return _respond(service.about)

    @app.get("/v1/examples", summary="Test images to try", **schema.EXAMPLES)
    async def examples() -> Response:
        return _respond({"examples": service.examples})

    @app.post(PREDICT, summary="Classify images", **schema.PREDICT)
    async def predict(request: Request) -> Response:
        asked = predict_request(await _fields(request, service, "images", several=True))
        served = service.find(asked.model)
        classifier = served.subject.classifier
        if asked.reject is not None:
            check_has_code(classifier.model)
        images = await service.unpack(read_pictures, classifier, asked.images, service.limits)
        reading = await asyncio.wrap_future(served.batches.submit(images))
        names = [name for name, _ in asked.images]
        found = answer(
            classifier, reading, images, names, top=asked.top, reject=asked.reject, details=asked.details
        )
        return _respond({"model": served.subject.name, "predictions": [entry.to_dict() for entry in found]})

    @app.post(ATTACK, summary="Attack an image", **schema.ATTACK)
    async def attack(request: Request) -> Response:
        deadline = time.monotonic() + service.limits.seconds
        asked = attack_request(await _fields(request, service, "image", several=False))
        return _respond(await _attack(service, asked, deadline))


async def _attack(service: Service, asked: AttackRequest, deadline: float) -> dict[str, Any]:
    served = service.find(asked.model)
    classifier, settings = served.subject.classifier, asked.settings
    made = settings.build(classifier, service.limits)
    image = await service.unpack(read_pictures, classifier, [asked.image], service.limits)
    work = served.attacks.run_until(
        deadline, lambda model: run_attack(classifier, model, image, made, settings.seed)
    )
    found = await asyncio.wrap_future(work)
    return {"model": served.subject.name, **dataclasses.asdict(settings), **dataclasses.asdict(found)}


async def _fields(request: Request, service: Service, files_field: str, *, several: bool) -> dict[str, Any]:
    """The fields of a JSON body or of a form; files are (name, bytes)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        fields: dict[str, Any] = await service.unpack(parse_json, await request.body())
        return fields
    if kind != "multipart/form-data":
        raise Refusal(
            415, f"the body should be application/json or multipart/form-data, not {kind[:100] or 'nothing'}."
        )
    entries: list[tuple[str, Any]] = []
    most = service.limits.images if several else 1
    try:
        async with request.form(
            max_files=most, max_fields=_FIELDS, max_part_size=service.limits.request_bytes
        ) as form:
            for name, value in form.multi_items():
                if isinstance(value, str):
                    entries.append((name, value))
                else:
                    entries.append((name, (value.filename or "the image", await value.read())))
    except StarletteHTTPException as error:
        if not str(error.detail).startswith("Too many files"):
            raise
        if several:
            raise too_many_images(most) from None
        raise InputError("an attack takes one image, and the form has more files.") from None
    return parse_form(entries, files_field, several=several)


def _respond(value: Any) -> Response:
    return JSONResponse(_plain(value))


def _plain(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON does not have and a broken model may return."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _add_handlers(app: FastAPI) -> None:
    """Makes every error a JSON answer with one sentence."""

    @app.exception_handler(Refusal)
    async def refuse(_: Request, refusal: Refusal) -> Response:
        return refusal.response()

    @app.exception_handler(InputError)
    async def explain(_: Request, error: InputError) -> Response:
        return Refusal(400 if isinstance(error, BodyError) else 422, str(error)).response()

    @app.exception_handler(OutOfTime)
    async def stop(_: Request, error: OutOfTime) -> Response:
        return busy("the attack took longer than it may: ask for fewer steps.").response()

    @app.exception_handler(Ended)
    async def end(_: Request, error: Ended) -> Response:
        return ending().response()

    @app.exception_handler(StarletteHTTPException)
    async def translate(_: Request, error: HTTPException) -> Response:
        sentence = str(error.detail).rstrip(".") + "."
        return JSONResponse({"error": sentence}, error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> Response:
        return Refusal(500, f"the model or the server failed: {type(error).__name__}.").response()


def _add_page(app: FastAPI) -> None:
    for path, (name, kind) in _PAGE.items():
        content = (resources.files("ecnn.serving") / "page" / name).read_bytes()
        app.add_api_route(path, _sender(content, kind), methods=["GET"], include_in_schema=False)


def _sender(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=kind)

    return send


def _examples(subject: Subject, split: Split) -> list[dict[str, Any]]:
    """The first image of each class, then the second of each, `_EXAMPLES` at most: true class and base64 of a PNG."""
    seen: dict[int, list[int]] = {}
    for place, label in enumerate(split.labels.tolist()):
        if len(seen.setdefault(label, [])) < 2:
            seen[label].append(place)
    chosen = [places[turn] for turn in (0, 1) for _, places in sorted(seen.items()) if turn < len(places)]
    names = subject.classifier.class_name
    found = []
    for place in chosen[:_EXAMPLES]:
        images, labels = split[place]
        label = int(labels)
        found.append({"label": label, "name": names(label), "image": to_png(images[0])})
    return found
