"""The web side of the server, in a thread of rank 0: the routes of TensorFlow Serving's REST interface, on starlette
and uvicorn. No MPI.

    POST /v1/models/NAME[/versions/N]:predict     {"instances": [row, ...]} -> {"predictions": [row, ...]}
    GET  /v1/models/NAME[/versions/N]             the states of the versions
    GET  /metrics                                 for Prometheus
    GET  /health                                  200 while a version answers, else 503

A body of an error is {"error": its text}. Clients are bounded: connections, bytes and nesting of a body, the time that
a head, a body and an answer may take. Names in a path are compared with the names of the versions; no file is opened by
a name.
"""

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from trainers.apps.serving.instances import answer_of, requested
from trainers.apps.serving.versions import Version, Versions
from trainers.errors import ArgumentError, TrainerError, needing

log = logging.getLogger("trainers")

PATH = re.compile(r"(?P<name>[^/:]+)(/versions/(?P<version>[0-9]{1,9}))?(?P<verb>:predict)?")
TYPES = {"application/json", "application/x-www-form-urlencoded", "text/plain", ""}  # curl's default too
MOST_HEAD = 1 << 14  # bytes of a request's head
HEAD_SECONDS, BODY_SECONDS = 10.0, 30.0  # in which a head and a body must come; an answer must be read as a body
KEEP_ALIVE_SECONDS = 75.0
PACKAGES = ("starlette", "uvicorn", "orjson", "prometheus_client")  # of the extra "serve"
LONGEST = 500  # characters of an error
Submit = Callable[[Version, np.ndarray], "Future[np.ndarray]"]
CLIENT_GONE = 499  # counted for a request whose client has closed the connection, as nginx counts it


class RefusedError(Exception):
    """A request that gets an error. code: HTTP's. headers: of the answer."""

    def __init__(self, code: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.code, self.headers = code, {name.replace("_", "-"): value for name, value in headers.items()}


class Limits(NamedTuple):
    """body_bytes, rows: of a request. connections: at a time. seconds: until an answer."""

    body_bytes: int
    rows: int
    connections: int
    seconds: float


class Pages:
    """The routes.

    submit: returns a Future of the outputs for rows; raises RefusedError if too many rows wait already. metrics:
    returns the text of /metrics and its type. count: called with the code of each answer, and its seconds.
    """

    def __init__(
        self, versions: Versions, submit: Submit, limits: Limits, metrics: Callable[[], tuple[bytes, str]],
        count: Callable[[int, float], object],
    ) -> None:  # fmt: skip
        self._versions, self._submit, self._limits = versions, submit, limits
        self._metrics, self._count = metrics, count

    def app(self) -> Any:
        """Return the ASGI application."""
        from starlette import applications, exceptions, routing

        routes = [
            routing.Route("/v1/models/{rest:path}", self._models, methods=["GET", "POST"]),
            routing.Route("/metrics", self._metric_page),
            routing.Route("/health", self._health),
        ]
        return applications.Starlette(routes=routes, exception_handlers={exceptions.HTTPException: self._http_error})

    async def _health(self, request: Any) -> Any:
        answers = bool(self._versions.available())
        return _json({"status": "ok" if answers else "no version answers"}, 200 if answers else 503)

    async def _models(self, request: Any) -> Any:
        from starlette.requests import ClientDisconnect

        begin = asyncio.get_running_loop().time()
        try:
            answer = await self._answered(request)
        except RefusedError as error:
            answer = _json({"error": str(error)[:LONGEST]}, error.code, error.headers)
        except ClientDisconnect:  # nobody gets this answer
            answer = _json({"error": "the client has closed the connection"}, CLIENT_GONE)
        except Exception as error:
            log.exception("the web server met an error, and continues")
            answer = _json({"error": f"the server met an error: {type(error).__name__}"}, 500)
        self._count(answer.status_code, asyncio.get_running_loop().time() - begin)
        return answer

    async def _answered(self, request: Any) -> Any:
        found = PATH.fullmatch(request.path_params["rest"])
        if found is None:
            raise RefusedError(404, "expected is /v1/models/NAME[/versions/N]:predict, or a GET without :predict")
        if found["name"] != self._versions.name:
            raise RefusedError(404, f"there is no model {found['name']!r} here; the model is {self._versions.name!r}")
        number, verb = int(found["version"]) if found["version"] else None, found["verb"]
        wanted = "POST" if verb == ":predict" else "GET"
        if request.method not in (wanted, "HEAD" if wanted == "GET" else wanted):
            raise RefusedError(405, f"{request.method} is not for this path; use {wanted}", Allow=wanted)
        if verb == ":predict":
            return await self._predicted(request, number)
        listed = [each for each in self._versions.listed() if number in (None, each.number)]
        if not listed:
            raise RefusedError(404, self._no_version(number))
        return _json({"model_version_status": [_status(each) for each in listed]})

    def _no_version(self, number: int | None) -> str:
        known = ", ".join(f"{each.number} ({each.state})" for each in self._versions.listed()) or "none"
        return (
            f"version {'' if number is None else f'{number} '}of {self._versions.name!r} is not there; known: {known}"
        )

    async def _predicted(self, request: Any, number: int | None) -> Any:
        version = self._versions.choose(number)
        if version is None:
            raise RefusedError(404 if number is not None else 503, self._no_version(number))
        body = await self._body(request)
        try:
            rows = requested(body, version.model, self._limits.rows)
        except TrainerError as error:
            raise RefusedError(400, str(error)) from error
        future = self._submit(version, rows)
        try:
            outputs = await asyncio.wait_for(asyncio.wrap_future(future), self._limits.seconds)
        except asyncio.TimeoutError:
            raise RefusedError(504, f"no answer came in {self._limits.seconds:g} s") from None
        except asyncio.CancelledError:  # by uvicorn
            raise RefusedError(503, "the server ends, and no answer came in --drain-seconds") from None
        return _response(answer_of(outputs), 200, {})

    async def _body(self, request: Any) -> bytes:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind not in TYPES:
            raise RefusedError(415, f"Content-Type is {kind[:80]!r}; send application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise RefusedError(415, "Content-Encoding is not supported; send the JSON as it is")
        most = self._limits.body_bytes
        too_large = RefusedError(
            413, f"the body has more than {most:,} bytes (--max-request-bytes); send fewer rows", Connection="close"
        )
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > most:
            raise too_large
        found = bytearray()

        async def read() -> None:
            async for piece in request.stream():
                found.extend(piece)
                if len(found) > most:
                    raise too_large

        try:
            await asyncio.wait_for(read(), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise RefusedError(
                408, f"the body did not come in {BODY_SECONDS:g} s; {len(found):,} bytes did", Connection="close"
            ) from None
        return bytes(found)

    async def _metric_page(self, request: Any) -> Any:
        text, kind = self._metrics()
        return _response(text, 200, {"content-type": kind})

    async def _http_error(self, request: Any, error: Any) -> Any:
        self._count(error.status_code, 0.0)
        return _json({"error": f"{request.method}: {error.detail}"[:LONGEST]}, error.status_code, error.headers)


def _json(given: dict[str, Any], code: int = 200, headers: Any = None) -> Any:
    return _response(json.dumps(given).encode(), code, headers or {})


def _response(body: bytes, code: int, headers: Any) -> Any:
    from starlette.responses import Response

    return Response(body, code, {"content-type": "application/json", **headers})


def _status(version: Version) -> dict[str, Any]:
    code = "OK" if not version.error else "UNKNOWN"
    status = {"error_code": code, "error_message": version.error}
    return {"version": str(version.number), "state": version.state, "status": status}


# The thread


class Web:
    """Serves the pages in a thread. listener: a bound socket."""

    def __init__(self, pages: Pages, listener: socket.socket, limits: Limits, drain_seconds: float) -> None:
        uvicorn: Any = import_module("uvicorn")
        for name in ("uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).setLevel(logging.ERROR)  # a client must not fill the log
        config = uvicorn.Config(
            pages.app(),
            http=_protocol(limits.connections),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=MOST_HEAD,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        )
        self._server, self._listener = uvicorn.Server(config), listener
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> None:
        """Take no more connections; end when all requests are answered. From any thread."""
        self._server.should_exit = True

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as error:
            self.error = error


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ArgumentError if the port is in use, say."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY for this one
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a server that has just ended
        listener.bind((address, port))
        listener.listen(1024)
    except (OSError, UnicodeError, OverflowError) as error:
        listener.close()
        raise ArgumentError(
            f"the server can't listen at {address}:{port}: {getattr(error, 'strerror', None) or error}; give another "
            "--port, or 0 for any free one"
        ) from error
    return listener


class Timers:
    """Closes a connection if something that is awaited does not come in time."""

    def __init__(self, loop: Any, transport: Any) -> None:
        self._loop, self._transport = loop, transport
        self._running: dict[str, Any] = {}

    def start(self, awaited: str, seconds: float) -> None:
        """Wait for this, unless it is awaited already."""
        if awaited not in self._running:
            self._running[awaited] = self._loop.call_later(seconds, self._transport.abort)

    def stop(self, awaited: str) -> None:
        if timer := self._running.pop(awaited, None):
            timer.cancel()


def _protocol(most: int) -> Any:
    """Return uvicorn's HTTP protocol with limits on connections and on the time in which a head comes and an answer is
    read, and with errors in JSON."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            self._timers = Timers(self.loop, transport)
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # so pause_writing is called for any bytes that wait
            if len(self.connections) > most:
                transport.abort()
                return
            self._timers.start("head", HEAD_SECONDS)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # a request runs
                self._timers.stop("head")
            else:
                self._timers.start("head", HEAD_SECONDS)

        def connection_lost(self, exc: Exception | None) -> None:
            self._timers.stop("head")
            self._timers.stop("answer")
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._timers.start("answer", BODY_SECONDS)

        def resume_writing(self) -> None:
            self._timers.stop("answer")
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            self.transport.write(bad_request(msg))
            self.transport.close()

    return Bounded


def bad_request(text: str) -> bytes:
    """Return the answer to what is no HTTP."""
    body = json.dumps({"error": f"{text} Heads have at most {MOST_HEAD} bytes."}).encode()
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


def check_packages() -> None:
    """Raise ArgumentError if a package of the server is missing."""
    with needing(f'serve needs {", ".join(PACKAGES)} ({{}}): pip install ".[serve]" in the checkout'):
        for name in PACKAGES:
            import_module(name)
