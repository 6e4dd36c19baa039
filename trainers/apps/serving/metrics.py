"""Metrics of the server, for Prometheus, by prometheus-client."""

from collections.abc import Callable

from trainers.apps.serving.batches import Waiting
from trainers.apps.serving.versions import Versions

PREFIX = "allreduce_serving_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)


class Metrics:
    """Counts answers and batches. ranks: returns how many ranks answer."""

    def __init__(self, waiting: Waiting, versions: Versions, ranks: Callable[[], int]) -> None:
        import prometheus_client as client

        self._client = client
        self._registry = registry = client.CollectorRegistry()

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            client.Gauge(PREFIX + name, text, registry=registry).set_function(value)

        self._codes = client.Counter(PREFIX + "answers", "Answers by HTTP code", ["code"], registry=registry)
        self._seconds = client.Histogram(
            PREFIX + "seconds", "Seconds from a request to its answer", buckets=SECONDS, registry=registry
        )
        self._rows = client.Histogram(PREFIX + "batch_rows", "Rows of a batch", buckets=ROWS, registry=registry)
        self._retries = client.Counter(PREFIX + "retries", "Requests that were dealt once more", registry=registry)
        gauge("waiting_rows", "Rows that wait", lambda: waiting.rows)
        gauge("ranks", "Ranks that answer, with rank 0", ranks)
        gauge("versions", "Versions that answer", lambda: len(versions.available()))
        gauge("newest_version", "The newest version that answers", lambda: _newest(versions))

    def count(self, code: int, seconds: float) -> None:
        """Count an answer. In the web thread."""
        self._codes.labels(code).inc()
        self._seconds.observe(seconds)

    def batch(self, rows: int) -> None:
        self._rows.observe(rows)

    def retried(self, requests: int) -> None:
        self._retries.inc(requests)

    def page(self) -> tuple[bytes, str]:
        """Return the text for Prometheus, and its type."""
        return self._client.generate_latest(self._registry), self._client.CONTENT_TYPE_LATEST


def _newest(versions: Versions) -> float:
    found = versions.available()
    return found[0].number if found else 0
