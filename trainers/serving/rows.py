"""The rows of what a worker is dealt: fetched when they are needed, or before, by the thread that hears of them."""

from trainers.data import Batch, Batches


class Rows:
    """Those of one epoch.

    parts: how many a batch has. ahead: whether `prepare` fetches.
    """

    def __init__(self, batches: Batches, epoch: int, parts: int, ahead: bool) -> None:
        self._batches, self._visited = batches, batches.order(epoch)
        self._parts, self._ahead = parts, ahead
        self._ready: dict[int, Batch | Exception] = {}

    def prepare(self, number: int) -> None:
        """Fetch the rows of part `number` for `take`, which raises what they raise."""
        if self._ahead:
            try:
                self._ready[number] = self._share(number)
            except Exception as error:  # whatever a data set raises, it is met where the rows are needed
                self._ready[number] = error

    def take(self, number: int) -> Batch:
        """The rows of part `number` of the epoch, which is a part of batch number // parts. Raises DataError."""
        found = self._ready.pop(number, None)
        if isinstance(found, Exception):
            raise found
        return self._share(number) if found is None else found

    def _share(self, number: int) -> Batch:
        return self._batches.share(self._visited, *divmod(number, self._parts))
