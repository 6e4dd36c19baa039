"""The code for GPUs, on a stand-in for one: NCCL over MPI, and streams whose accesses to memory are checked."""

import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from allreduce.arrays import gpu
from tests import launch
from tests.conftest import JobRunner
from tests.gpu.fake_gpu import Gpu, TorchCuda

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed here")


def test_a_call_comes_after_all_that_has_written() -> None:
    """A call comes after all writes, on whatever stream, and before all later work. An unrecorded stream is a race."""
    import torch

    from trainers.replicas.pytorch.devices import Cuda

    for noted in (2, 1):
        gpu = Gpu()
        cuda = TorchCuda(gpu)
        device = Cuda(torch.device("cpu"), cuda)
        gpu.track(0, 100)
        crossing = device.crossing()
        for at in range(2):
            with cuda.stream(cuda.Stream()):
                gpu.access(10 * at, 10, True, "a gradient", gpu.of_torch)
                if at < noted:
                    crossing.mark_writer()
        crossing.submitted()
        with crossing.running():
            gpu.access(0, 20, True, "a reduction", gpu.of_torch)
        assert bool(gpu.races) == (noted == 1)
        gpu.races.clear()
        if noted == 2:
            crossing.wait_on_stream()
        gpu.access(0, 20, False, "an update", gpu.of_torch)
        assert bool(gpu.races) == (noted == 1)
        assert gpu.synchronized == 0  # the host has waited for nothing


def test_the_next_batch_is_copied_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies waits for the copy, so the stream that computes need not. It keeps the memory."""
    import torch

    from trainers.replicas.pytorch.devices import Cuda

    pinned, kept = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(stream.cuda_stream))
    for waits in (True, False):
        gpu = Gpu()
        cuda = TorchCuda(gpu)
        device, computing = Cuda(torch.device("cpu"), cuda), cuda.Stream()
        gpu.track(0, 1 << 62)
        if not waits:
            monkeypatch.setattr(gpu, "synchronize", lambda recorded: None)
        batch = torch.arange(6.0)
        staged: list[torch.Tensor] = []
        in_thread(lambda device=device, batch=batch, staged=staged: staged.append(device.stage(batch)))
        assert staged[0].data_ptr() != batch.data_ptr()
        with cuda.stream(computing):
            device.use(staged[0])
            assert staged[0].sum() == 15
        assert kept.pop() == computing.cuda_stream
        assert pinned.pop() is batch
        assert any("copy_" in line for line in gpu.log)
        assert bool(gpu.races) == (not waits), gpu.races


def test_threads_take_the_gpu_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's current device belongs to a thread: the worker's would be GPU 0 on all ranks."""
    held = threading.local()
    runtime = SimpleNamespace(getDevice=lambda: getattr(held, "device", 0), getDeviceCount=lambda: 4)
    device = lambda number: SimpleNamespace(use=lambda: setattr(held, "device", number))  # noqa: E731
    monkeypatch.setattr(gpu, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=device)))

    def taken(node_rank: int) -> list[int]:
        """Return the device in this thread and in another one."""
        found = []
        for run in (lambda work: work(), lambda work: in_thread(work)):
            run(lambda: (gpu.choose_device(node_rank), found.append(runtime.getDevice())))
        held.device = 0
        return found

    for chosen, current, expected in ((None, 0, 2), (None, 3, 3), (1, 0, 1), (0, 0, 0)):
        monkeypatch.setattr(gpu, "_device", None)
        held.device = current
        if chosen is not None:
            gpu.set_device(chosen)
        assert taken(6) == [expected] * 2


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_an_optimizer_is_tried_out_where_its_parameters_are() -> None:
    """Fused optimizers keep their step count on the GPU, to which the count of a saved state must be moved."""
    import torch

    from trainers.replicas.pytorch.optimizer import _trial_state

    class Counting(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["step"] = torch.zeros((), device=parameter.device)

    optimizer = Counting([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert _trial_state(optimizer, torch.device("meta"))["step"].device.type == "meta"


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_the_script_says_that_there_is_no_gpu() -> None:
    """And installs nothing; the exit code is NO_GPU."""
    done = subprocess.run(["bash", launch.ROOT / "scripts/gpu_test.sh"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "gpu_test.sh: no GPU here (nvidia-smi lists none), so nothing was done" in done.stderr


def test_on_two_ranks(mpirun: JobRunner) -> None:
    """See the program."""
    job = mpirun(2, ["-m", "tests.gpu.cuda_job"], timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout == "done\n"
