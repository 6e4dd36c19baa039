"""README.md, CONTRIBUTING.md, the cards (README.md of a folder) and the pages of docs/: each command in them that two
cores can run is run, and links, names of files, options and messages are real.

The commands of a page run one after the other in a folder, as they stand, or made short by SHORTER. A command that
several pages have runs for the first one only. A command that can't run here has a line in SKIPPED, which says why.
The programs of pages are run by test_programs.py (docs/programs) and test_api.py (blocks that begin with a name).
"""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from allreduce import NAMES, Topology, algorithms
from allreduce.health import stall
from benchmarks.lib.results import to_json
from tests import launch
from tests.benchmarks.made_runs import made_run
from tests.conftest import lacking
from tests.programs.catalog import PROGRAMS
from tests.training.test_datasets import mnist
from tests.training.test_tables import HEADER, people, write

FOLDERS = ("allreduce", "trainers", "benchmarks", "scripts", "tests")
CARDS = sorted(path for folder in FOLDERS for path in (launch.ROOT / folder).rglob("README.md"))
TOP = [launch.ROOT / "README.md", launch.ROOT / "CONTRIBUTING.md", *CARDS]
PAGES = [*TOP, *sorted((launch.ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^( *)(`{3,})([^\n]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"bash", "diff", "ini", "python", "text", "yaml"}
INLINE = re.compile(r"(?<!`)`((?:[A-Z_]+=\S+ )?(?:mpirun|bash|sudo|python -m [^\s`]+)\s[^`]+)`")  # with an argument
NEXT_LINE = re.compile(r"\s*(?:\\|(?<=&&))\n\s*")  # a command goes on there
PROGRAM = re.compile(r"python|bash|sudo|allreduce ")  # what is not a fragment, as `mpirun --bind-to core` is
OF_A_PAGE = re.compile(r" python (?:docs/programs/)?\w+\.py\b|^python \w+\.py")  # see above
PLACEHOLDER = re.compile(r"\.\.\.|(?<![\w$=/-])[A-Z]{3,}(?![\w=])")  # `python -m trainers --data FILE`

# Why a command that begins so is not run.
SKIPPED = {
    ".venv/bin/pip": "installs",
    "ALLREDUCE_TEST_MPIJOB_CRD=": "takes a file of another project; house/test_kubernetes.py says which",
    "CPU_ONLY=1": "takes a file of another project; docs/convert/programs.md says which",
    "KEEP_GOING=": "a cluster",
    "KERAS_BACKEND=tensorflow": "TensorFlow is not installed; test_keras.py runs the program",
    "PYTHON_ENV=": "a GPU",
    "apt-get install": "installs packages of the system",
    "bash scripts/": "they install; other tests run them, or their parts",
    "conda": "installs",
    "curl": "asks a server; apps/test_serving.py does",
    "docker": "a container",
    'grep "call 301 of"': "takes the files of a job that failed; health/test_dump.py reads such files",
    "kill": "sends a signal to other programs",
    "kubectl": "a cluster",
    "module load": "a cluster",
    "mpiexec": "several hosts",
    "mpirun --hostfile hosts": "several hosts",
    "mpirun --with-ft": "test_lost_ranks.py loses ranks",
    "mpirun -n 2 python -m benchmarks.jax_step": "half a minute; test_jax.py runs it",
    "mpirun -n 2 python -m benchmarks.training_step": "minutes; test_pytorch.py runs it",
    "mpirun -n 2 python -m tests.torch_backend.pytorch_suite": "minutes; torch_backend/test_jobs.py runs some",
    "mpirun -n 3 --oversubscribe python -m pytest": "the tests run it",
    "mpirun -n 3 python -m tests.sequences": "minutes; test_composition.py runs some",
    "mpirun -n 6 python scripts/torch_pipeline.py": "half a minute each; torch_backend/stages_job.py trains so",
    "mpirun -n 4 allreduce bench": "the package need not be installed; processes/test_commands.py runs it",
    "mpirun -n 4 python -m trainers --device cuda": "a GPU",
    "mpirun -n 4 python -m trainers search": "takes the file of its page; apps/test_search_jobs.py runs it",
    "mpirun -n 4 --oversubscribe python -m trainers --epochs 300": "to be killed by hand; test_lost_ranks.py does it",
    "mpirun -n 3 --oversubscribe python -m trainers --epochs 300": "resumes what was killed; test_checkpoint.py too",
    "pip install": "installs",
    "python -m http.server": "a server; test_browser.py has one",
    "python -m benchmarks.serving": "minutes; apps/test_serving.py runs its parts",
    "python -m benchmarks.timeline slow_rank.json": "takes the file of the page's program; the same as trace.json's",
    "python -m pytest": "the tests run it",
    "python -m tests.faults": "minutes; test_faults.py runs a few",
    "python -m tests.programs": "clones the programs of others",
    "mpirun -n 2 python -m tests.programs.pytorch_file": "takes a file of another project",
    "python -m tests.matrix": "minutes; test_matrix.py runs some",
    "python -m tests.fuzz": "minutes; test_fuzz.py runs a few",
    "python3 -m venv": "installs",
    "salloc": "a cluster",
    "sbatch": "a cluster",
    "source .venv": "sets the environment",
    "srun": "a cluster",
    "sudo": "test_cluster_sim.py runs the rig; root",
}
# Options that make a command short.
SHORTER = {
    "benchmarks.bandwidth": "-b 1K -e 16K -n 2 -w 0",
    "benchmarks.compression": "--size 64K --methods none,bfloat16,int8 --iters 1",
    "benchmarks.latency": "-e 32 --turns 1",
    "benchmarks.strategies": "--epochs 1 --only mirrored --slow-factor 0",
    "benchmarks.tune": "-n 1 --output table.json",
    "trainers": "--epochs 1",
}
CODES = {"allreduce doctor": 2, "benchmarks.compare": 1}  # the worst exit code, for what they find on a busy machine
VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
MODULE = re.compile(
    r"python -m ((?:trainers|benchmarks|allreduce)[\w.]*(?: doctor| search| predict| export| serve)?)"
    r"((?=[\s`])[^`\n|]*|$)"
)
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def name_of(page: Path) -> str:
    return page.relative_to(launch.ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The texts of the blocks of code of a language."""
    found = [(match[3], match[4]) for match in FENCE.finditer(page.read_text())]
    return [text for kind, text in found if kind.removeprefix("{code-block} ").strip() == language]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def commands(page: Path) -> list[str]:
    """The commands in shell blocks, without remarks, and those in the text. A loop is one command."""
    text = "\n".join(NEXT_LINE.sub(" ", block) for block in blocks(page, "bash") if not block.startswith("#!"))
    text = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), text)
    lines = [re.sub(r"(?:^|\s+)#.*", "", line).strip() for line in text.splitlines()]
    text = re.sub(
        r"^for .*?^done$",
        lambda loop: loop[0].replace("\n", "; ").replace("do;", "do"),
        "\n".join(lines),
        flags=re.MULTILINE | re.DOTALL,
    )
    inline = [re.sub(r"\s+", " ", span).replace(r"\|", "|") for span in INLINE.findall(prose(page))]
    wanted = [*text.splitlines(), *(span for span in inline if PROGRAM.search(span))]
    return [line for line in wanted if line and not line.startswith((":", "export ")) and not PLACEHOLDER.search(line)]


def scripts() -> dict[str, list[str]]:
    """By page, the commands that no page before it has."""
    seen: set[str] = set()
    found: dict[str, list[str]] = {}
    for page in PAGES:
        new = [line for line in dict.fromkeys(commands(page)) if line not in seen and not OF_A_PAGE.search(line)]
        seen.update(new)
        found[name_of(page)] = new
    return found


def skipped(command: str) -> bool:
    return re.sub(r"^(?:NETWORK|RANKS)=\S+ ", "", command).startswith(tuple(SKIPPED))


def shortened(command: str) -> str:
    """The command with options that make it short, and which may not fail."""
    for module, options in SHORTER.items():
        command = re.sub(
            rf"(python -m {re.escape(module)}(?! predict| export)(?= |$)[^;|>]*)", rf"\1 {options}", command
        )
    worst = max((code for name, code in CODES.items() if name in command), default=0)
    loop = command.startswith("for ")
    return command if loop else f"{command} || [ $? -le {worst} ] || exit 9"


def test_the_list_holds_nothing_that_is_gone() -> None:
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) > 100
    assert [start for start in SKIPPED if not any(command.startswith(start) for command in found)] == []


def run_pages() -> list[Any]:
    """Return the pages with commands to run; those that a new user does not read first are expensive."""
    pages = [page for page, lines in scripts().items() if not all(map(skipped, lines))]
    first = ("README.md", "docs/start/")
    return [pytest.param(page, marks=() if page.startswith(first) else pytest.mark.expensive) for page in pages]


@pytest.mark.jobs
@pytest.mark.parametrize("page", run_pages())
def test_commands(tmp_path: Path, page: str) -> None:
    script = "\n".join(shortened(line) for line in scripts()[page] if not skipped(line))
    try:
        environment = launch.environment("openmpi")
    except launch.MissingEnvironmentError as error:
        lacking(error)
        return
    if "--plot" in script and not find_spec("matplotlib"):
        lacking("matplotlib is not installed")
    for name in ("before.json", "after.json", "n2.json", "n3.json", "n4.json"):
        (tmp_path / name).write_text(to_json(made_run()))
    (tmp_path / "new.csv").write_text(3 * f"{','.join(64 * '5')}\n")  # images as those of digits
    rows = [["a name", *row] for row in people(200)]
    for name in ("people.csv", "part-1.csv", "part-2.csv"):
        write(tmp_path / name, rows, ["name", *HEADER])
    (tmp_path / "mnist").mkdir()
    mnist(tmp_path / "mnist")
    (tmp_path / "trace.json").write_text(json.dumps([{"ph": "X", "ts": 0, "dur": 1, "pid": 0, "tid": 0}]))
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(launch.ROOT), "PATH": path, **VARIABLES}
    job = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert job.returncode == 0, f"{script}\n{job.stdout}{job.stderr}"
    assert "Traceback" not in job.stderr


# The help of many commands in one process, because importing takes longest.
HELP = """
import contextlib, io, json, runpy, sys
shown = {}
for command in sys.argv[1:]:
    sys.argv, out = command.split(), io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_module(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, command
    shown[command] = out.getvalue()
print(json.dumps(shown))
"""


def test_options_exist() -> None:
    """Those of this project's commands, in the text and in tables too."""
    used: dict[str, set[str]] = {}
    for page in PAGES:
        for module, arguments in MODULE.findall(page.read_text().replace("\\\n", " ")):
            options = OPTION.findall(arguments.partition(" #")[0].partition(" -- ")[0])
            used.setdefault(module, set()).update(options)
    assert len(used) > 8
    if not find_spec("jax"):  # a quick run installs no JAX
        used.pop("benchmarks.jax_step", None)
    helps = {module: f"{module} --help{'-all' * (module == 'trainers')}" for module in used}
    command = [sys.executable, "-c", HELP, *helps.values()]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=launch.ROOT, check=True).stdout)
    for module, named in used.items():
        unknown = {each for each in named if not re.search(rf"(?<![\w-]){each}(?![\w-])", told[helps[module]])}
        assert unknown == set(), f"{module}: {unknown}"


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def headings(page: Path) -> set[str]:
    """The anchors of a page, and of what it includes."""
    parts = [page, *(page.parent / name for name in re.findall(r"^```\{include\} (\S+\.md)$", page.read_text(), re.M))]
    return {slug(heading) for part in parts for heading in re.findall(r"^#+ (.*)$", prose(part), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_is_there_and_its_blocks_say_what_they_are(page: Path) -> None:
    """Links lead somewhere on GitHub too."""
    for link in re.findall(r"\]\((?!\w+:)([^)]+)\)", prose(page)):
        name, _, place = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), link
        assert not place or target.suffix != ".md" or place in headings(target), link
    names = rf"(?<![\w/.-])(?:{'|'.join([*FOLDERS, 'docs'])})/[\w/.]+\.(?:py|sh|sbatch|md|png|svg|json)\b"
    missing = {name for name in re.findall(names, page.read_text()) if not (launch.ROOT / name).is_file()}
    assert missing <= {"allreduce/algorithms/NAME.py", "docs/how/NAME.md"}
    languages = {match[3].removeprefix("{code-block} ").strip() for match in FENCE.finditer(page.read_text())}
    assert {language for language in languages if not language.startswith("{")} <= LANGUAGES
    for block in blocks(page, "python"):
        ast.parse(re.sub(r"^:\w[^\n]*\n", "", block, flags=re.MULTILINE))
    assert "<!--" not in page.read_text(), "a text that is still missing"


def local_links(page: Path) -> list[str]:
    return re.findall(r"\]\((?!\w+:)([^)#]+)", prose(page))


def test_the_front_page_and_cards_are_short_and_lead_to_every_section_and_card() -> None:
    front = TOP[0].read_text()
    assert len(front.splitlines()) <= 130
    folders = {f"{folder}/README.md" for folder in FOLDERS}
    sections = {name_of(path) for path in (launch.ROOT / "docs").glob("*/index.md")}
    assert (sections | folders) - {"docs/start/index.md"} <= {*local_links(TOP[0])}
    reached = {name_of((card.parent / link).resolve()) for card in CARDS for link in local_links(card)}
    assert {name_of(card) for card in CARDS} - reached - folders <= {"allreduce/doctor/README.md"}
    for card in CARDS:
        assert len(card.read_text().splitlines()) <= 40, card
        assert sum("docs/" in link for link in local_links(card)) >= 2, card


def test_the_front_page_shows_the_programs_of_the_site() -> None:
    """test_programs.py runs them."""
    programs = launch.ROOT / "docs" / "programs"
    shown = blocks(TOP[0], "python")
    assert len(shown) == 2
    for block in shown:
        first, _, text = block.partition("\n")
        assert text == (launch.ROOT / first.removeprefix("# ")).read_text().partition('"""\n\n')[2]
    (change,) = blocks(TOP[0], "diff")
    whole = (programs / "first_pytorch.py").read_text().splitlines()
    assert [line for line in change.splitlines() if line[1:] not in whole] == []
    assert sum(line.startswith("+") for line in change.splitlines()) == 3


def test_the_seconds_of_a_stall_report_are_one_constant() -> None:
    """In the table of variables, and in the sentences that name the default."""
    table = (launch.ROOT / "docs" / "trouble" / "variables.md").read_text()
    for variable, seconds in stall.DEFAULTS.items():
        assert re.search(rf"^\| `{variable}` \|.*\| {seconds:g} \|$", table, re.MULTILINE), variable
        assert f"{variable}, else {seconds:g}" in (Topology.__doc__ or "")
    end = "(?! the error)[^.]*?(?:table|where each rank waits)"  # a page's error comes after its time-out
    sentence = re.compile(rf"(?:after|for|Wait) (\d+) seconds{end}")
    said = [seconds for page in PAGES for seconds in sentence.findall(page.read_text().replace("\n", " "))]
    assert len(said) > 5
    assert set(said) == {f"{stall.DEFAULTS[stall.STALL]:g}"}


def test_the_table_of_backends_is_made_from_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new algorithm is in it, with its words and its formula, and no page has to be edited."""
    made = pytest.importorskip("docs.backends", exc_type=ImportError)
    monkeypatch.setattr(algorithms, "BACKENDS", {**algorithms.BACKENDS, "new": algorithms.class_of("ring")})
    rows = dict(re.findall(r"^\| \[?`(\w+)`\S* \| (.*) \|$", made.table(), re.MULTILINE))
    assert set(rows) == {*NAMES, *algorithms.OTHERS, "new"}
    assert rows["new"] == rows["ring"]
    assert "2 (n-1) alpha + 2 (n-1)/n S beta" in rows["ring"]
    assert "2 log2 p alpha + 2 (p-1)/p S beta" in rows["halving_doubling"]
    assert "```{backends}\n```" in (launch.ROOT / "docs" / "how" / "algorithms.md").read_text()


def test_the_rows_of_others_programs_can_be_repeated() -> None:
    """Each row is of a program in the list, of its commit, and on a number of ranks that it runs on."""
    text = (launch.ROOT / "docs" / "convert" / "programs.md").read_text()
    table = text.partition("| program | version |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in table]
    listed = [
        [program.name, f"{program.source} {program.commit[:8]}", str(ranks)]
        for program in PROGRAMS
        for ranks in program.ranks
    ]
    assert len(rows) > 3
    for name, version, ranks in rows:
        source, _, number = version.partition(" ")
        packaged = [name, f"{source} ", ranks] in listed and re.fullmatch(r"[\d.]+", number)  # has no commit
        assert packaged or [name, version, ranks] in listed, (name, version, ranks)
