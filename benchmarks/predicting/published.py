"""Under which assumptions the speedups come out that were published for distributed TensorFlow.

6x on 8 GPUs for neural translation, 32x on 50 for Inception and 300x on 500 for RankBrain: Jeff Dean's figures of
early 2016, as A. Geron reports them (Hands-On Machine Learning, on bandwidth saturation), without step times,
links or servers. The step time is solved for; everything else is assumed below, in numbers that a reader can change.
Training went through parameter servers: each worker pushes its gradients and pulls parameters, over the servers' links.
"""

from dataclasses import dataclass, replace

from benchmarks.predicting.costs import Cluster, Machine, hierarchical_copy, on_link
from benchmarks.predicting.forecast import BACKWARD, exposed


@dataclass(frozen=True)
class Case:
    """One published speedup and what is assumed about it."""

    name: str
    workers: int
    speedup: float
    pushed: float  # bytes of gradients that a worker sends in a step
    pulled: float  # bytes of parameters that it gets in a step
    servers: int
    link: float  # bytes per second, each way, of a worker and of a server
    node_size: int  # workers of one host
    sparse: bool
    assumed: str
    plausible: str  # how the step time that comes out compares with what is known


CASES = (
    Case(
        "neural translation",
        8,
        6.0,
        4 * 210e6,
        4 * 210e6,
        2,
        12e9,
        8,
        False,
        "GNMT with 210 M parameters in float32; 8 GPUs in one host; the parameters in its memory, behind two PCIe "
        "3.0 switches of 12 GB/s",
        "6 x 210 M x 128 sentences x 25 words = 4 Tflop a step: 4.8 Tflop/s, more than half a K80 has (4.4), "
        "less than a Titan X or P100 of 2016 (7 to 10)",
    ),
    Case(
        "Inception",
        50,
        32.0,
        4 * 24e6,
        4 * 24e6,
        17,
        1.25e9,
        1,
        False,
        "Inception-v3 with 24 M parameters in float32; one K40 a host and 17 servers, as in the TensorFlow paper "
        "(Abadi et al. 2016, section 6.3, checked in a summary); 10 Gb/s",
        "5 G multiply-adds x 6 x 32 images = 1.0 Tflop a step: 2.4 Tflop/s on a K40 (peak 4.3); the paper's own "
        "steps took about 1.9 s with 50 workers, so there both computing and exchange were slower than here",
    ),
    Case(
        "RankBrain",
        500,
        300.0,
        14e6,
        14e6,
        50,
        1.25e9,
        1,
        True,
        "sparse: of embeddings with 1 G parameters a step touches 20,000 rows of 128 (10 MB), and 1 M parameters are "
        "dense (4 MB); 50 servers; 10 Gb/s; asynchronous. Nothing of this was published",
        "nothing is known to hold it against",
    ),
)
DENSE_BYTES = {"RankBrain": 4 * 1.001e9}  # what a dense all-reduce of a sparse model would have to carry


@dataclass(frozen=True)
class Outcome:
    """The speedup of one way to exchange gradients."""

    way: str
    communication: float  # seconds a step
    speedup: float


def exchange(case: Case) -> float:
    """Seconds a step in which the servers' links, or a worker's own, carry what is pushed and pulled.

    Pushes and pulls go opposite ways over a link that carries both at once, so the larger one counts.
    """
    larger = max(case.pushed, case.pulled)
    return max(larger, case.workers * larger / case.servers) / case.link


def speedup(case: Case, compute: float, communication: float, overlap: float = 0.0) -> float:
    """Steps of all workers in the time of one step of one worker that exchanges nothing."""
    return case.workers * compute / (compute + exposed(communication, compute, overlap))


def solve(case: Case) -> float:
    """The computing time of a step, in seconds, with which the published speedup comes out, without overlap."""
    if not 0 < case.speedup < case.workers:
        raise ValueError(f"{case.name}: a speedup of {case.speedup} on {case.workers} workers can't be explained")
    return exchange(case) / (case.workers / case.speedup - 1)


def alternatives(case: Case, machine: Machine) -> list[Outcome]:
    """What other ways to exchange the same gradients would have made of it.

    machine: the node's constants; the link is the case's.
    """
    compute = solve(case)
    half = replace(case, pushed=case.pushed / 2, pulled=case.pulled / 2)
    ways = [
        ("parameter servers (as published)", exchange(case), 0.0),
        ("16-bit gradients and parameters on the wire", exchange(half), 0.0),
        ("overlap with the backward pass", exchange(case), BACKWARD),
        ("both", exchange(half), BACKWARD),
    ]
    ways += _sparse_ways(case) if case.sparse else _dense_ways(case, machine)
    return [Outcome(way, seconds, speedup(case, compute, seconds, overlap)) for way, seconds, overlap in ways]


def _dense_ways(case: Case, machine: Machine) -> list[tuple[str, float, float]]:
    whole, half = (_hierarchical(case, machine, nbytes) for nbytes in (case.pushed, case.pushed / 2))
    return [("hierarchical copy, no servers", whole, 0.0), ("hierarchical copy, 16 bits, overlap", half, BACKWARD)]


def _hierarchical(case: Case, machine: Machine, nbytes: float) -> float:
    nodes = case.workers // case.node_size
    if nodes == 1:  # each GPU reads and writes every other one's slice over its switch: 2 (n-1)/n S
        return 2 * (case.workers - 1) / case.workers * nbytes / case.link
    return hierarchical_copy(on_link(machine, case.link, machine.net_alpha), Cluster((case.node_size,) * nodes), nbytes)


def _sparse_ways(case: Case) -> list[tuple[str, float, float]]:
    gathered = (case.workers - 1) * case.pushed / case.link
    dense = 2 * (case.workers - 1) / case.workers * DENSE_BYTES[case.name] / case.link
    return [
        ("all-gather of the sparse gradients, no servers", gathered, 0.0),
        ("all-reduce of them as if they were dense, 16 bits, overlap", dense / 2, BACKWARD),
    ]


def report(machine: Machine) -> list[str]:
    """The whole of it as lines of text."""
    lines = ["# Published speedups, and what would have to be true. Solved for: the computing time of a step."]
    lines += [f"# {line}" for line in SOURCE] + ["#"]
    for case in CASES:
        compute, seconds = solve(case), exchange(case)
        lines += [
            f"# {case.name}: {case.speedup:g}x on {case.workers}",
            f"#   assumed: {case.assumed}",
            f"#   exchanged a step: {case.pushed / 1e6:.0f} MB pushed and {case.pulled / 1e6:.0f} MB pulled by each "
            f"worker, {seconds:.3f} s on the servers' links",
            f"#   so a step computes {compute:.3f} s ({case.plausible})",
            f"  {'way':<62}{'exchange(s)':>12}{'speedup':>9}{'efficiency':>12}",
        ]
        for way in alternatives(case, machine):
            share = way.speedup / case.workers
            lines.append(f"  {way.way:<62}{way.communication:>12.3f}{way.speedup:>8.1f}x{share:>12.0%}")
        lines.append("#")
    return [*lines, *(f"# {line}" for line in LIMITS)]


SOURCE = (
    "Source of the three speedups: Jeff Dean (Google Brain), state of early 2016, as reported in A. Geron, Hands-On",
    'Machine Learning, "Bandwidth saturation". Seen there; the talk itself was not found. Checked: 17 servers and K40s',
    "(Abadi et al. 2016). Not checked, assumed from memory: sizes of the models, links, batches, speeds of the GPUs.",
)
LIMITS = (
    "Overlap is an upper bound: two thirds of the computing time hide communication, which is all of it where 100 %",
    "is shown; measured overlap is less.",
    "What this leaves out: stragglers (synchronous workers wait for the slowest of them), the servers' own time to",
    "apply updates, traffic of others, and that 16 bits or stale gradients may need more steps. An asynchronous",
    "speedup counts steps, not progress: some of RankBrain's 300x may have been lost to stale gradients. Assumptions",
    "other than these explain the same three figures as well; one figure can't tell step time from link speed.",
)
