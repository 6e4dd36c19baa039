"""A job for test_jobs.py: scripts/torch_pipeline.py on meshes of 1 to 6 ranks, against one process without stages.

Each case trains on the first ranks of the job, over our process group and over gloo, and compares the losses and the
parameters. Prints one line a case, "NAME same" or "NAME different ...". Run under mpirun -n 6.
"""

import contextlib
import io
import runpy
import shutil
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import allreduce.torch_backend  # noqa: F401
from trainers import datasets

SCRIPT = Path(__file__).parents[2] / "scripts" / "torch_pipeline.py"
TRAINING = ["--epochs", "1", "--batch", "288", "--width", "8", "--layers", "6", "--dtype", "float64", "--seed", "3"]
SCHEDULES = ("gpipe", "1f1b", "interleaved")
CLOSE = 1e-6

warnings.simplefilter("ignore")
torch.set_num_threads(1)


pipeline = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
Result = tuple[list[float], dict[str, torch.Tensor]]  # the losses of the epochs, and this rank's parameters


def alone(epochs: int) -> Result:
    """Train the same model in this process, without stages, microbatches or replicas."""
    options = pipeline.make_parser().parse_args(TRAINING)
    layers = pipeline.layers(options)
    model = torch.nn.Sequential(*layers.values())
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    data = datasets.load("digits")
    x, y = torch.tensor((data.x_train - data.shift) * data.scale).double(), torch.tensor(data.y_train)
    losses = []
    for epoch in range(epochs):
        order, total = torch.randperm(len(x), generator=torch.Generator().manual_seed(options.seed + epoch)), 0.0
        batches = order[: len(x) // options.batch * options.batch].split(options.batch)
        for rows in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches))
    named = {f"{name}.{rest}": each for name, layer in layers.items() for rest, each in layer.named_parameters()}
    return losses, {name: each.detach() for name, each in named.items()}


def staged(stages: int, replicas: int, *given: str, tensor: int = 1, backend: str = "allreduce") -> Result | None:
    """Train on the first ranks; return the losses and this rank's parameters, None on the other ranks. Collective."""
    ranks = stages * replicas * tensor
    arguments = [*TRAINING, "--stages", str(stages), "--tensor-parallel", str(tensor), "--backend", backend, *given]
    parser = pipeline.make_parser()
    options = parser.parse_args(arguments)
    pipeline.check(parser, options, ranks)
    everyone = dist.new_group(list(range(ranks)), backend=backend)
    names, override = ("replica", "stage", "tensor"), ((backend, None),) * 3
    places = torch.arange(ranks).view(replicas, stages, tensor)
    mesh = DeviceMesh("cpu", places, mesh_dim_names=names, backend_override=override)
    if dist.get_rank() >= ranks:
        return None
    with contextlib.redirect_stdout(io.StringIO()):
        epochs, parameters = pipeline.run(options, mesh, everyone)
    whole = {name: torch.from_numpy(pipeline.complete(each)) for name, each in parameters.items()}
    if tensor == 1:  # DTensor keeps meshes, and gives a later mesh of the same ranks the groups of an earlier one
        for group in (*(mesh[name].get_group() for name in names), everyone):
            dist.destroy_process_group(group)
    return [epoch.loss for epoch in epochs], whole


def compare(name: str, found: Result | None, wanted: Result) -> None:
    """Print on rank 0 whether all ranks have the wanted losses and parameters. Collective."""
    error = 0.0
    if found is not None:
        losses = zip(found[0], wanted[0][-len(found[0]) :], strict=True)
        error = max(abs(one - other) for one, other in losses)
        error = max(error, *(float((each - wanted[1][key]).abs().max()) for key, each in found[1].items()))
    errors = torch.tensor([error])
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(name, "same" if errors.item() < CLOSE else f"different by {errors.item():.2e}", flush=True)


def refused(arguments: str, text: str) -> bool:
    """Return whether the script ends on 6 ranks with a message that contains `text`."""
    parser, said = pipeline.make_parser(), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            pipeline.check(parser, parser.parse_args(arguments.split()), 6)
    except SystemExit as end:
        return end.code == 2 and text in said.getvalue()
    return False


REFUSED = {
    "--stages 4": "are 4 ranks, and this job has 6; start it by mpirun -n 4",
    "--stages 3 --chunks 2": "needs --schedule interleaved, not 1f1b",
    "--stages 3 --schedule interleaved --layers 5": "6 stages need 6 layers or more, not 5",
    "--stages 3 --batch 100": "can't be divided among 2 replicas of 4 microbatches",
    "--stages 3 --microbatches 2": "1f1b needs 3 --microbatches or more",
    "--stages 3 --schedule interleaved --microbatches 4": "interleaved needs a multiple of 3 --microbatches",
    "--stages 2 --tensor-parallel 3": "4 heads",
    "--stages 3 --allreduce ring --backend gloo": "needs --backend allreduce",
    "--stages 0": ">= 1",
}


def loads(folder: str, text: str) -> bool:
    """Return whether the script refuses to load a folder with a message that contains `text`; "": whether it loads."""
    try:
        pipeline.load(Path(folder), pipeline.layers(pipeline.make_parser().parse_args(TRAINING)))
    except SystemExit as end:
        return bool(text) and text in str(end)
    return not text


def folders(folder: str) -> bool:
    """Return whether files of two saves, and a damaged one, are refused. Changes the folder, which 2 stages saved."""
    first = Path(folder, "stage0of2.npz")
    done = [
        sorted(each.name for each in Path(folder).iterdir()) == ["stage0of2.npz", "stage1of2.npz"],
        loads(folder, ""),
    ]
    shutil.copy(first, Path(folder, "stage0of3.npz"))
    done.append(loads(folder, "the files of one --save"))
    Path(folder, "stage0of3.npz").unlink()
    first.write_bytes(first.read_bytes()[:200])
    return all([*done, loads(folder, "stage0of2.npz is damaged")])


def main() -> None:
    dist.init_process_group("allreduce")
    one, two = alone(1), alone(2)
    for stages in (1, 2, 3):
        for replicas in (1, 2):
            for schedule in SCHEDULES if stages > 1 else SCHEDULES[:1]:
                given = ["--schedule", schedule, "--microbatches", "6" if stages == 3 else "4"]
                name = f"{stages} stages x {replicas} replicas {schedule}"
                ours = staged(stages, replicas, *given)
                compare(name, ours, one)
                if (stages, replicas, schedule) == (3, 2, "1f1b"):
                    compare(f"{name} as gloo", staged(stages, replicas, *given, backend="gloo"), ours or one)
    compare("3 stages x 2 tensor parallel", staged(3, 1, tensor=2), one)
    compare("1 stage x 2 replicas x 2 tensor parallel", staged(1, 2, tensor=2), one)
    if dist.get_rank() == 0:
        accepted = [arguments for arguments, text in REFUSED.items() if not refused(arguments, text)]
        print("refused options", "same" if not accepted else f"different: {accepted}", flush=True)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    staged(3, 2, "--save", folder[0])
    continued = staged(2, 1, "--load", folder[0], "--save", folder[0], tensor=2)
    compare("saved by 3 stages, continued by 2 with tensor parallel", continued, two)
    if dist.get_rank() == 0:
        print("files of stages", "same" if folders(folder[0]) else "different", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
