"""The backend "allreduce" of torch.distributed in whole programs, under mpirun and without."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import JobRunner

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason='PyTorch is not installed (the extra "torch")'
)


def code(text: str) -> list[str]:
    head = (
        "import tests.without_dynamo\n"
        "import os, sys, time, datetime, torch, torch.distributed as dist\n"
        "def wait_for_rank_0():\n"
        "    while not os.path.exists('done'): time.sleep(0.05)\n"
    )
    return ["-c", head + textwrap.dedent(text)]


@pytest.mark.expensive
def test_pipeline_stages_train_as_one_process_does(mpirun: JobRunner) -> None:
    job = mpirun(6, ["-m", "tests.torch_backend.stages_job"], timeout=240)
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    assert len(lines) == 14 + 1 + 5  # cells, as gloo, others
    assert all(line.endswith(" same") for line in lines), job.stdout


def test_autoloading_initialises_mpi_only_when_the_backend_is_used(mpirun: JobRunner) -> None:
    """If the backend is only installed, PyTorch still reports missing variables itself, and groups of other backends
    work.

    Neither an aborted group, nor a program that neither destroys a group nor waits, ends a job.
    """
    job = mpirun(
        2,
        code("""
            import allreduce_torch_autoload
            allreduce_torch_autoload.register()
            allreduce_torch_autoload.register()
            for backend in ("gloo", "cpu:gloo,cuda:nccl", None):
                try:
                    dist.init_process_group(backend)
                except ValueError as error:
                    print(error)
            alone = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
            os.environ.update(alone)
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(3))
            dist.destroy_process_group()
            print(sorted({"allreduce", "mpi4py"} & set(sys.modules)))
            for name in alone:
                del os.environ[name]

            dist.init_process_group("allreduce")
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [2, 2, 2]
            dist.destroy_process_group()
            dist.init_process_group("cpu:allreduce,cuda:allreduce")  # and again
            dist.all_reduce(tensor)
            print(tensor.tolist())
            aborted = dist.new_group(backend="allreduce")
            aborted.abort()
            try:
                dist.all_reduce(tensor, group=aborted)
            except RuntimeError as error:
                print(error)
            dist.all_reduce(torch.ones(1_000_000), async_op=True)  # which nobody waits for
        """),
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("environment variable RANK expected, but not set") == 2 * 3, job.stdout
    assert job.stdout.count("[]") == 2
    assert job.stdout.count("this process group has been aborted") == 2
    assert job.stdout.count("[4.0, 4.0, 4.0]") == 2
    said = [line for line in job.stderr.splitlines() if "hostname of the client socket" not in line]
    assert said == []  # PyTorch's store looks for names of addresses, which takes a name server


def test_one_process_without_a_launcher_is_one_rank() -> None:
    """But a process is not accepted if a launcher has started several that know nothing of each other, nor one that
    PyTorch takes for one of several, nor an older PyTorch. Without a process group, and with gloo's, `require` says so;
    tests/ranks/torch_backend/test_calls.py has models whose gradients ours does not average."""
    script = code("""
        import allreduce_torch_autoload
        allreduce_torch_autoload.register()
        for name in ("SLURM_PROCID", "RANK"):
            os.environ[name] = "0"
            try:
                dist.init_process_group("allreduce")
            except ValueError as error:
                print("expected, but not set" in str(error))
            del os.environ[name]
        dist.init_process_group("allreduce")
        print(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
        from allreduce.torch_backend import require
        for backend in (None, "gloo"):
            if backend is not None:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            try:
                require(torch.nn.Linear(1, 1))
            except Exception as error:
                print(error)
        dist.destroy_process_group()
        version, torch.__version__ = torch.__version__, "2.6.0+cpu"
        del sys.modules["allreduce.torch_backend"]
        try:
            import allreduce.torch_backend
        except Exception as error:
            print(error)
        torch.__version__ = version
        dist.init_process_group("allreduce", store=dist.HashStore(), rank=1, world_size=2)
    """)
    names = ("SLURM", "PMI", "OMPI_COMM", "RANK", "WORLD", "MASTER")
    given = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    alone = subprocess.run([sys.executable, *script], env=given, capture_output=True, text=True, timeout=120, cwd=ROOT)
    *told, without, gloo, older = alone.stdout.splitlines()
    assert told == ["True", "True", "0 1"], alone.stderr
    assert 'no process group; call torch.distributed.init_process_group("allreduce")' in without
    assert 'runs on "gloo", not on "allreduce"' in gloo
    assert "needs PyTorch 2.7 or later, and this is 2.6.0+cpu" in older
    assert "PyTorch takes this process for rank 1 of 2 and MPI for rank 0 of 1" in alone.stderr
    assert "mpirun -n 2" in alone.stderr


def test_without_multithreaded_mpi_operations_run_in_the_caller(mpirun: JobRunner) -> None:
    """Importing the backend communicates nothing: rank 1 imports it after rank 0 has reported that it did.

    MirroredOptimizer reduces after backward, reports that once, and is right.
    """
    job = mpirun(
        2,
        code("""
            import mpi4py
            mpi4py.rc.thread_level = "funneled"
            from mpi4py import MPI
            world = MPI.COMM_WORLD
            if world.rank == 1:
                world.recv(source=0)
            import allreduce.torch_backend
            if world.rank == 0:
                world.send("imported", dest=1)
            variables = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
            assert variables == [str(world.rank), "2", str(world.rank), "2"]

            dist.init_process_group("allreduce")
            tensor = torch.ones(3)
            work = dist.all_reduce(tensor, async_op=True)
            assert work.is_completed()
            doubled = work.get_future().then(lambda future: future.value()[0] * 2)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
            model(torch.ones(2, 3)).sum().backward()
            print(doubled.wait().tolist())
            dist.destroy_process_group()

            from trainers.pytorch import Buckets, MirroredOptimizer
            model = torch.nn.Linear(3, 2)
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            with MirroredOptimizer(plain, model, buckets=Buckets(True)) as optimizer:
                (model.bias.sum() * (world.rank + 1)).backward()
                optimizer.step()
                print(model.bias.grad.tolist(), optimizer._parts.reducer.during)
        """),
    )
    assert (job.returncode, job.stdout.count("[4.0, 4.0, 4.0]")) == (0, 2), job.stderr
    assert job.stdout.count("[1.5, 1.5] False") == 2
    assert job.stderr.count("no MPI_THREAD_MULTIPLE") == 1
    assert job.stderr.count("gradients are reduced after backward, not during it: ") == 1


def test_a_rank_that_leaves_is_missed(mpirun: JobRunner) -> None:
    """Without the time-out, which is half an hour by default. Messages of several threads raise an error in each
    thread; so does a collective.

    A message from rank 1 arrives although rank 2 has left; and that rank 1 leaves while a group is destroyed raises
    nothing.
    """
    job = mpirun(
        3,
        code("""
            import threading
            import allreduce.torch_backend.process_group as process_group
            dist.init_process_group("allreduce")
            process_group.CLOSE_SECONDS = 2
            messages, closing = dist.new_group([0, 1]), dist.new_group([0, 1])
            dist.all_reduce(torch.ones(3))
            rank, tensor = dist.get_rank(), torch.ones(1)
            def receive(tag):
                try:
                    dist.recv(torch.ones(1), 1, tag=tag, group=messages)
                except Exception as error:
                    print(f"{type(error).__name__} {error}", flush=True)
            if rank == 0:
                dist.recv(tensor, 1, tag=9)
                print("received", flush=True)
                dist.destroy_process_group(closing)
                print("goes on", flush=True)
                threads = [threading.Thread(target=receive, args=(tag,)) for tag in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                dist.all_reduce(tensor)
            elif rank == 1:
                time.sleep(3)  # longer than a rank that has left is waited for
                dist.send(tensor, 0, tag=9)
                closing._free = lambda: sys.exit(0)
                dist.destroy_process_group(closing)
        """),
        env={"ALLREDUCE_STALL_SECONDS": "1"},
    )
    assert job.returncode != 0
    assert "received\ngoes on\n" in job.stdout
    assert "this process group is not freed" in job.stderr
    assert job.stdout.count("RankLeftError rank 1 has left") == 3
    for tag in range(3):
        assert f"recv from rank 1 with tag {tag}" in job.stdout
    assert "it has ended its program, while this rank waits for it in all_reduce" in job.stderr


def test_a_rank_that_fails_or_hangs_in_one_call_is_an_error_of_the_others(mpirun: JobRunner) -> None:
    """A thread that hangs for good, in a callback or in MPI's call on the group's own communicator, ends with the job,
    at the end of the program."""
    job = mpirun(
        2,
        code("""
            import threading
            import allreduce.call.queue as queue
            import allreduce.torch_backend.move as move
            queue.EXIT_SECONDS = 1
            dist.init_process_group("allreduce", timeout=datetime.timedelta(seconds=2))
            group = dist.new_group(timeout=datetime.timedelta(seconds=3))
            dist.all_reduce(torch.ones(3), group=group)
            queued, step = threading.Event(), queue.Worker._step  # the call must not end before it has its callback
            queue.Worker._step = lambda worker: queued.wait() and step(worker)
            later = []  # a callback that waits for what is queued behind it
            def wait(future):
                later[0].wait()
            first = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().then(wait)
            later.append(dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future())
            queued.set()
            try:
                first.wait()
            except RuntimeError as error:
                print(str(error).splitlines()[0], flush=True)
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            print(tensor.tolist(), flush=True)

            if dist.get_rank() == 1:
                def fails(*_):
                    raise MemoryError("on purpose")
                move.chunked.broadcast = fails
            try:
                dist.broadcast(torch.zeros(4), src=1)
            except (MemoryError, dist.DistBackendError) as error:
                print(type(error).__name__, str(error).splitlines()[0], flush=True)
            time.sleep(60 * dist.get_rank())
        """),
        timeout=50,
    )
    assert job.stdout.count("a callback on the future of all_reduce was not done within 3 s") == 2, job.stderr
    assert job.stdout.count("[2.0, 2.0, 2.0]") == 2
    assert "MemoryError on purpose" in job.stdout, job.stderr
    assert "DistBackendError broadcast was not done within 2 s" in job.stdout, job.stderr


def test_after_caught_timeouts_a_program_ends_with_its_own_exit_code(mpirun: JobRunner, tmp_path: Path) -> None:
    """No call is left in MPI, so nothing has to be ended by force. Destroying a group waits for no abandoned rank,
    whatever call timed out: the first or a later one, a wait with a limit, a future's wait, a monitored barrier.

    Messages with different tags: a rank reports where both wait, long before the time-out, and each reports it at its
    end.
    """
    job = mpirun(
        2,
        code("""
            import allreduce.torch_backend
            import allreduce.torch_backend.process_group as process_group
            from allreduce.torch_backend import point_to_point
            point_to_point.EXIT_SECONDS = 1
            process_group.CLOSE_SECONDS = 1000  # longer than this test
            short = datetime.timedelta(seconds=2)
            dist.init_process_group("allreduce", timeout=datetime.timedelta(seconds=4))
            rank = dist.get_rank()

            def said(call, *arguments, **options):
                try:
                    call(*arguments, **options)
                except RuntimeError as error:
                    print(error, flush=True)

            sent = dist.isend(torch.ones(1), 1 - rank, tag=5)
            said(dist.recv, torch.ones(1), 1 - rank, tag=7 + rank)
            later, waited, barrier = (dist.new_group(timeout=short) for _ in range(3))
            dist.all_reduce(torch.ones(3), group=later)
            if rank == 1:
                wait_for_rank_0()  # and come to no call at all
                raise SystemExit(0)

            for group in (None, later):
                works = [dist.all_reduce(torch.ones(3), async_op=True, group=group) for _ in range(2)]
                said(works[0].get_future().wait)
                for work in works:
                    said(work.wait)
            said(dist.all_reduce(torch.ones(3), async_op=True, group=waited).wait, datetime.timedelta(seconds=0.2))
            said(dist.monitored_barrier, barrier, datetime.timedelta(0))
            for group in (later, waited, barrier, None):
                dist.destroy_process_group(group)
            open("done", "w").close()
            raise SystemExit(7)
        """),
        timeout=90,
        cwd=tmp_path,
        env={"ALLREDUCE_STALL_SECONDS": "1"},
    )
    assert job.returncode == 7, job.stderr
    assert re.search(r"rank \d has waited \d+ s for other ranks in: recv from rank ", job.stderr)
    for rank in (0, 1):
        place = f"  rank {rank}: waits in recv from rank {1 - rank} with tag {7 + rank} of process group 0"
        assert place in job.stderr
        assert place in job.stdout
        assert f"recv from rank {1 - rank} with tag {7 + rank} was not done within 4 s" in job.stdout
    assert "it computes" not in job.stdout.partition("all_reduce was not done")[0]
    for seconds in (4, 2):
        assert job.stdout.count(f"all_reduce was not done within {seconds} s") == 3, job.stdout
    assert "all_reduce was not done within 0.2 s" in job.stdout
    assert "timed out in monitoredBarrier after 0 s: Rank 1 failed to pass monitoredBarrier" in job.stdout
    assert "rank 1: has not arrived" in job.stdout
    assert "MPI_ABORT" not in job.stderr


@pytest.mark.expensive
def test_some_of_pytorchs_own_tests(mpirun: JobRunner) -> None:
    """pytorch_suite.py runs them all, in a minute or two."""
    names = ["DistributedDataParallelCPU", "all_reduce_coalesced_full_group_sum", "send_recv_any_source"]
    names += ["get_backend"]  # which LIMITS names
    job = mpirun(
        2, ["-m", "tests.torch_backend.pytorch_suite", "--only", *[f"test_{name}" for name in names]], timeout=120
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.splitlines()[-1] == "{'passed': 3, 'failed': 1}, not as expected: none"
