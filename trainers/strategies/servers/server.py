"""The one loop of a server: it receives the requests and gradients of workers, and answers as a policy says."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from allreduce.arrays import dtypes
from trainers.replica import Replica
from trainers.strategies.rule import FLAGS, WEIGHT, UpdateRule
from trainers.strategies.servers.mailbox import ASK, BYE, END, Arrival, Header, Mailbox, Message, check


class Policy(ABC):
    """How a server uses the gradients of an epoch, and which parts of batches it deals. All methods are local.

    means: the metrics that each reply carries.
    """

    means: np.ndarray = np.empty(0)

    @property
    @abstractmethod
    def parts(self) -> int:
        """A valid push is of a part with a lower number than this."""

    @abstractmethod
    def hear(self, halt: int) -> None:
        """Take note of the `halt` of a message that has arrived."""

    @abstractmethod
    def take(self, push: Arrival) -> Sequence[Arrival]:
        """Take a push, and update the parameters if it is time. Returns the pushes whose memory is not needed any
        more."""

    @abstractmethod
    def answer(self, request: Arrival) -> Header | None:
        """Return the header of the reply to a request; None if the worker has to wait."""


class Server:
    """Serves the workers of one epoch after the other. shard: the parameters, which replies carry."""

    def __init__(self, mailbox: Mailbox, shard: "Shard") -> None:
        self._mailbox, self._shard = mailbox, shard
        self._newest: Message | None = None  # the last reply; several workers may get the same

    @np.errstate(all="ignore")  # a diverged model shows in the loss; NumPy's warnings add nothing
    def serve(self, policy: Policy, workers: Sequence[int]) -> None:
        """Receive and answer messages until every worker has finished the epoch."""
        present, requests = set(workers), list[Arrival]()
        self._newest = None
        self._mailbox.open()
        while present:
            arrival = self._mailbox.next("receive requests and gradients from workers")
            header = arrival.message.header
            check(header, arrival.tag, policy.parts, self._shard.version)
            policy.hear(header.halt)
            if arrival.tag == ASK:
                requests.append(arrival)
            elif header.kind == BYE:
                present.discard(arrival.worker)
                continue
            else:
                for push in policy.take(arrival):
                    self._mailbox.clear(push)
            requests = [each for each in requests if not self._answer(each, policy)]
        self._mailbox.drain()

    def _answer(self, request: Arrival, policy: Policy) -> bool:
        """Reply to a request. Returns False if the worker has to wait."""
        header = policy.answer(request)
        if header is None:
            return False
        if header.kind != END:
            self._mailbox.clear(request)
        reply = self._newest
        if reply is None or reply.header != header:
            reply = self._newest = self._mailbox.message()
            reply.header = header
            reply.measures[: policy.means.size] = policy.means
            reply.body[:] = self._shard.parameters
        self._mailbox.reply(reply, request.worker)
        return True


class Shard:
    """The slice `part` of a replica's flat parameters, which only this rank updates.

    parameters, gradients: 1-D views of the slice; the constructor takes the whole flat buffers that the replica is
        bound to.
    version: the number of updates so far.
    """

    def __init__(
        self, replica: Replica, rule: UpdateRule, parameters: np.ndarray, gradients: np.ndarray, part: slice
    ) -> None:
        self._replica, self._rule, self.part = replica, rule, part
        self.parameters, self.gradients = parameters[part], gradients[part]
        self._accumulator = dtypes.TYPES[self.gradients.dtype].accumulator
        self.version = 0

    def apply(self, gradients: np.ndarray, factor: float) -> None:
        """Update the slice by `gradients`, with the learning rate multiplied by `factor`. Local."""
        self.gradients[:] = gradients
        self._update(factor)

    def weigh(self, means: np.ndarray) -> np.ndarray:
        """Divide the summed gradients by the mean weight of the rows; see UpdateRule.weigh. Return the metrics. Local.

        means: of the metrics; then, for each of Replica.optional, 0 if no rank has a gradient for it; the mean weight.
        """
        metrics = len(self._replica.metrics)
        self._replica.still = means[metrics:-1] == 0
        measured = np.zeros(metrics + len(FLAGS))
        measured[:metrics], measured[metrics + WEIGHT] = means[:metrics], means[-1]
        self._rule.weigh(measured, [self.trained_gradients])
        return measured[:metrics]

    def transform_and_update(self) -> None:
        """Transform the gradients in the bound buffer, which are all gradients, and update by them. Local."""
        self._rule.transform([self.trained_gradients])
        self._update(1.0)
        for meter in self._rule.meters:
            meter.on_train_batch_end()

    @property
    def trained_gradients(self) -> np.ndarray:
        """The gradients of the slice, without the statistics that may follow the parameters."""
        return self.gradients[: max(0, self._replica.parameter_count - self.part.start)]

    def _update(self, factor: float) -> None:
        """Update the slice by the gradients that are in the bound buffer. Local.

        `factor` multiplies the learning rate, not the gradients, because Adam-like optimizers ignore the scale of
        gradients.
        """
        replica = self._replica
        rates = replica.learning_rates
        if factor != 1.0:
            replica.learning_rates = [rate * factor for rate in rates]
        try:
            self._rule.update(self.part)
            self._rule.raise_kept()
        finally:
            if factor != 1.0:
                replica.learning_rates = rates
        replica.refresh()
        self.version += 1

    def add_up(self, summands: Sequence[np.ndarray], share: float = 1.0) -> None:
        """Write the sum of `summands`, divided by `share`, into the bound buffer; 16-bit floats are summed in float32.
        Local."""
        total = self.gradients
        if total.dtype != self._accumulator:
            total = np.zeros(total.size, self._accumulator)
        np.copyto(total, summands[0])
        for summand in summands[1:]:
            total += summand
        if share != 1.0:
            total /= total.dtype.type(share)
        if total is not self.gradients:
            self.gradients[:] = total.astype(self.gradients.dtype)

    def is_finite(self) -> bool:
        """Whether all parameters are finite."""
        return bool(np.isfinite(self.parameters).all())
