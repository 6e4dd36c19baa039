"""Pipeline stages: the bubble, and the messages between stages.

A rank waits while the pipeline fills and drains. With S stages, M microbatches and C chunks of each rank, a rank
computes M C pieces and waits for S - 1 more, so the bubble is (S - 1) / (M C + S - 1) of the time. C = 1: GPipe
(Y. Huang et al.: GPipe, 2019) and 1F1B, which needs less memory. C > 1: the interleaved schedule (D. Narayanan et al.:
Efficient large-scale language model training on GPU clusters using Megatron-LM, 2021): the bubble, relative to the
computation, is (S - 1) / M divided by C. The model assumes that all pieces take the same time.

If ranks outnumber cores, a rank computes for cores / ranks of the time at most. Other ranks compute while it waits in
the bubble, so the parts don't add up: a rank waits for the larger of both.
"""

from dataclasses import dataclass, replace

from allreduce.transport.cost import Layout, Machine, link, message

SCHEDULES = ("gpipe", "1f1b", "interleaved")


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return the part of a step in which a rank waits for other stages. chunks: stages of each rank."""
    return (stages - 1) / (microbatches * chunks + stages - 1)


def crowded(ranks: int, cores: int) -> float:
    """Return the part of a step in which a rank waits, at least, because ranks outnumber cores: others compute."""
    return max(0.0, 1 - cores / ranks)


@dataclass(frozen=True)
class Plan:
    """How a replica's model and batch are divided. chunks: stages of each rank (1, unless interleaved)."""

    stages: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1

    @property
    def messages(self) -> int:
        """Messages of a replica in a step: an activation and a gradient for each microbatch and boundary."""
        return 2 * self.microbatches * (self.stages * self.chunks - 1)

    def transfer(self, machine: Machine, at: Layout, node_size: int, sent: int) -> float:
        """Return the time of the slowest message between two stages. A replica's stages are on ranks in a row."""
        if self.stages == 1:
            return 0.0
        if at.nodes == 1 or node_size % self.stages == 0:
            return message(sent, at, machine)
        return link(sent, machine)

    def seconds(self, compute: float, transfer: float, ranks: int, cores: int) -> float:
        """Return the time in which a rank computes for `compute`: with the bubble and the messages that nothing hides.

        ranks, cores: of a node. A rank exchanges the messages of a piece while it computes another one. The first and
        the last messages, which cross all stages, are hidden by nothing.
        """
        if self.stages == 1:
            return compute
        pieces = self.microbatches * self.chunks
        piece = max(compute / pieces, 2 * transfer)
        whole = (pieces + self.stages - 1) * piece + 2 * (self.stages - 1) * transfer
        return max(whole, compute / (1 - crowded(ranks, cores or ranks)))

    def group(self, at: Layout, node_size: int) -> tuple[Layout, int]:
        """Return the ranks of one stage, and how many such groups use the link of a node at once."""
        replicas = at.ranks // self.stages
        if at.nodes == 1:
            return replace(at, sizes=(replicas,), sharing=at.largest), 1
        sizes = placed(replicas, max(1, node_size // self.stages)).sizes
        return replace(at, sizes=sizes, sharing=at.largest), min(self.stages, node_size)


def placed(ranks: int, node_size: int, cores: int = 0) -> Layout:
    """Return the layout of `ranks` ranks on full nodes; the last node may be smaller. cores: of a node; 0: enough."""
    full, rest = divmod(ranks, node_size)
    return Layout((node_size,) * full + ((rest,) if rest else ()), cores=cores)
