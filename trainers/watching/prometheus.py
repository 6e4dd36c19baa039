"""Prometheus: metrics of a training for a Prometheus server to scrape."""

from typing import Any

from trainers.arguments import is_integer
from trainers.errors import ArgumentError, needing
from trainers.watching.callback import Callback, Logs

PREFIX = "allreduce_training_"
GAUGED = ("loss", "samples_per_second", "communication_share")  # logs of an epoch with a gauge of their own
GAUGES = {
    "loss": ("loss", "The loss of the last epoch"),
    "samples_per_second": ("rows_per_second", "Rows of all ranks in a second of the last epoch"),
    "communication_share": ("communication_share", "Share of the last epoch that ranks spent in communication"),
    "epoch": ("epoch", "Epochs that are done"),
    "ranks": ("ranks", "Ranks that train"),
}


class Prometheus(Callback):
    """Serves metrics of the training at http://ADDRESS:PORT/metrics, for a Prometheus server. Rank 0 serves.

    port: 0 takes any free port, which the attribute `port` then holds. address: of the interface on which rank 0
    listens; "0.0.0.0" lets other hosts read the metrics. If rank 0 fails, the new rank 0 serves.

    Metrics, each with the prefix `allreduce_training_`: steps_total, of the process that serves; ranks; epoch, loss,
    rows_per_second and communication_share of the last epoch; `metric{name=...}`: its other metrics. And those of
    prometheus-client about this process: process_resident_memory_bytes, ... Raises ArgumentError on all ranks if
    prometheus-client is missing (the extra "prometheus"), or if the port can't be used.
    """

    reads_batches = reads_model = False

    def __init__(self, port: int = 9400, address: str = "127.0.0.1") -> None:
        if not is_integer(port, 0, 2**16 - 1):
            raise ArgumentError(f"port={port!r}: give a number from 0 to 65535; 0 takes any free port")
        self.port, self.address = port, address
        self._served: dict[str, Any] = {}
        self._server: Any = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self.trainer.rank == 0:
            self._serve()

    def on_ranks_change(self) -> None:
        if self.trainer.rank == 0 and self._server is None:
            self._serve()
        if self._served:
            self._served["ranks"].set(self.trainer.size)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._served:
            self._served["steps"].inc()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if not self._served:
            return
        self._served["epoch"].set(epoch + 1)
        for name, value in (logs or {}).items():
            if name in GAUGED:
                self._served[name].set(value)
            elif isinstance(value, int | float):
                self._served["metric"].labels(name).set(value)

    def _serve(self) -> None:
        with needing('Prometheus needs prometheus-client ({}): pip install ".[prometheus]" in the checkout'):
            import prometheus_client as client
        registry = client.CollectorRegistry()
        self._served = {
            name: client.Gauge(f"{PREFIX}{shown}", text, registry=registry) for name, (shown, text) in GAUGES.items()
        }
        metric = client.Gauge(f"{PREFIX}metric", "A metric of the last epoch", ["name"], registry=registry)
        steps = client.Counter(f"{PREFIX}steps", "Steps of the training", registry=registry)
        self._served |= {"metric": metric, "steps": steps}
        self._served["ranks"].set(self.trainer.size)
        client.ProcessCollector(registry=registry)
        try:
            self._server, _ = client.start_http_server(self.port, self.address, registry)
        except OSError as error:
            raise ArgumentError(
                f"Prometheus: rank 0 can't listen at {self.address}:{self.port}: {error.strerror or error}; give "
                "another port, or 0 for any free one"
            ) from error
        self.port = self._server.server_port

    def _release(self) -> None:
        server, self._server, self._served = self._server, None, {}
        if server is not None:
            server.shutdown()
            server.server_close()
