"""The programs that others wrote, and how each runs on CPUs."""

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

NANOGPT = {
    r"f'cuda:\{ddp_local_rank\}'": "'cpu'",
    r"torch\.cuda\.set_device\(device\)": "pass",
    r", device_ids=\[ddp_local_rank\]": "",
}
JOIN = {  # on CPUs Accelerate's join_uneven_inputs does nothing, and the ranks wait for each other for ever
    "import Mock$": "import Mock, patch",
    r"with (?=accelerator\.join_uneven_inputs\(\[ddp)": "with patch.object(Accelerator, 'multi_device', True), ",
}
COMM_HOOK = {
    r"(device_ids|output_device)=.*,$": r"\1=None,",
    r"^ +\(DDP.*BF16.*": "",  # PyTorch refuses hooks for bfloat16 without NCCL
}
PICOTRON = {
    r"^(from flash_attn|import wandb).*": "",
    r"torch\.cuda\.synchronize\(\)": "None",
    r"device='cuda'": "device='cpu'",
    r"tokenizer\.batch_encode_plus\(": "tokenizer(",  # the names of newer versions of Transformers
    r"config\.rope_theta": "10000.0",
}
COLLECTIVES = (
    "all_reduce,reduce,broadcast,gather,scatter,all_gather,all_gather_base,all_to_all,all_to_allv,"
    "reduce_scatter,reduce_scatter_base"
)


@dataclass(frozen=True)
class Program:
    """A program of others.

    source: the repository on GitHub, with its commit, or the name of an installed package. command: the arguments of
    Python. ranks: on how many ranks it runs, one row each. edits: regular expressions and their replacements, in every
    file of Python of its copy: most programs name GPUs. prepare: writes its data into the folder in which it runs.
    shows: a regular expression of its results. groups: whether it has process groups of torch.distributed, to be
    put over gloo and over this library. refused, why: a regular expression of the error by which this library refuses
    it on purpose, and the reason.
    """

    name: str
    source: str
    command: str
    commit: str = ""
    ranks: tuple[int, ...] = (2,)
    edits: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None
    shows: str = ""
    groups: bool = True
    refused: str = ""
    why: str = ""


def tiny_text(work: Path) -> None:
    """Write nanoGPT's data: the bytes of its README."""
    import numpy as np

    folder = work / "data" / "tiny"
    folder.mkdir()
    text = np.frombuffer((work / "README.md").read_bytes(), np.uint8).astype(np.uint16)
    for name in ("train.bin", "val.bin"):
        text.tofile(folder / name)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


def tiny_llama(sizes: Mapping[str, int], work: Path) -> None:
    """Write a Llama of 4 layers, a tokenizer of 64 words, sentences, and a configuration for picotron."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = work / "model"
    words = [f"w{number}" for number in range(64)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    LlamaForCausalLM(config).save_pretrained(work / "hf_model_safetensors")
    (work / "text").mkdir()
    rows = [{"text": " ".join(words[(row * 7 + place * place) % 64] for place in range(33))} for row in range(64)]
    (work / "text" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parallel = {"tp_size": 1, "cp_size": 1, "pp_size": 1, "dp_size": 1, "pp_engine": "1f1b", "use_cpu": True, **sizes}
    training = {
        "seed": 42, "learning_rate": 1e-2, "total_train_steps": 5, "seq_length": 32, "micro_batch_size": 2,
        "gradient_accumulation_steps": 2, "num_samples": 64, "max_tokens": None,
    }  # fmt: skip
    settings = {
        "distributed": parallel,
        "model": {"name": str(folder), "use_fused_adam": False},
        "training": training,
        "dataset": {"name": str(work / "text"), "num_workers": 0, "num_proc": 1},
        "checkpoint": {"save_dir": "ckpt", "save_frequency": 3, "load_path": ""},
        "logging": {"use_wandb": False, "run_name": None},
        "environment": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FLASH_ATTEN": "0", "HF_TOKEN": ""},
    }
    (work / "tiny.json").write_text(json.dumps(settings))


def named_param(work: Path) -> None:
    """Give PARAM's folder the name by which its files import each other."""
    (work / "param_bench").symlink_to(work)


def accelerate_scripts(work: Path) -> None:
    """Copy the scripts of Accelerate's wheel."""
    import accelerate

    shutil.copytree(Path(accelerate.__path__[0], "test_utils", "scripts"), work, dirs_exist_ok=True)


def tiny_bert(work: Path) -> None:
    """Write a small BERT with random weights, and rows that look like those of GLUE's MRPC, for test_checkpointing."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    accelerate_scripts(work)
    folder = work / "bert"
    folder.mkdir()
    words = [f"w{number}" for number in range(32)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=37, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    (work / "mrpc").mkdir()
    for name, count in (("train", 90), ("validation", 50)):
        rows = [
            {"idx": row, "sentence1": words[row % 32], "sentence2": words[row * 5 % 31], "label": row % 2}
            for row in range(count)
        ]
        (work / "mrpc" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (work / "external_deps" / "evaluate.py").write_text(EVALUATE)


COMMON = """
import contextlib, os, pathlib, tempfile, torch
torch.FatalError = RuntimeError
def mpi_env_rank_and_size():
    return int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
def skip_or_fail_gpu_test(test, message):
    test.skipTest(message)
@contextlib.contextmanager
def temppath():
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "file")
"""
MUON = "not test_broadcast_state and not test_force_allreduce or no_grad"  # see docs/convert/horovod_differences.md


def horovods_helpers(work: Path) -> None:
    """Replace the helper modules of Horovod's tests, which need a build of Horovod."""
    (work / "test" / "parallel" / "common.py").write_text(COMMON)
    (work / "pytest.ini").write_text("[pytest]\n")


EVALUATE = """class load:
    def __init__(self, *names):
        self.right = []
    def add_batch(self, predictions, references):
        self.right += (predictions == references).tolist()
    def compute(self):
        right, self.right = self.right, []
        return {"accuracy": sum(right) / len(right)}
"""


def script(name: str, *ranks: int, **options: Any) -> Program:
    """Return a script of Accelerate's wheel."""
    made = {"prepare": accelerate_scripts, "environment": {"ACCELERATE_USE_CPU": "true"}, **options}
    return Program(f"Accelerate: {name.partition(' ')[0]}", "accelerate", name, ranks=ranks, **made)


PROGRAMS = [
    script("test_script.py", 2),
    script("test_sync.py", 2, 3),
    script("test_ops.py", 2, 3),
    script("test_distributed_data_loop.py", 2, edits=JOIN),
    script("test_ddp_comm_hook.py", 2, edits=COMM_HOOK),
    script(
        "external_deps/test_checkpointing.py --model_name_or_path bert --output_dir out", 2,
        prepare=tiny_bert, edits={'"nyu-mll/glue", "mrpc"': '"mrpc"'}, shows=r"^epoch \d: .*",
    ),
    Program(
        "nanoGPT: train.py", "karpathy/nanoGPT",
        "train.py --dataset=tiny --device=cpu --compile=False --dtype=float32 --n_layer=2 --n_head=2 --n_embd=32"
        " --block_size=32 --batch_size=4 --gradient_accumulation_steps=4 --max_iters=20 --eval_interval=10"
        " --eval_iters=2 --learning_rate=1e-2 --warmup_iters=2 --lr_decay_iters=20",
        commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291", ranks=(2, 4), prepare=tiny_text, edits=NANOGPT,
        shows=r"^(?:iter|step) \d+: .*loss [\d.]+",
    ),
    *(
        Program(
            f"picotron: train.py, {name}", "huggingface/picotron", "train.py --config tiny.json",
            commit="59714b1bf25541dbeb6f5a721ed15f6d0768e786", ranks=(ranks,), edits=PICOTRON,
            prepare=partial(tiny_llama, sizes), shows=r"Step: \d+ +\| Loss: +[\d.]+",
        )
        for name, ranks, sizes in (
            ("tensor and pipeline parallel", 4, {"tp_size": 2, "pp_size": 2}),
            ("context and data parallel", 4, {"cp_size": 2, "dp_size": 2}),
            ("all four", 16, {"tp_size": 2, "pp_size": 2, "cp_size": 2, "dp_size": 2}),
        )
    ),
    *(
        Program(
            f"PARAM: comms.py, {name}", "facebookresearch/param",
            "train/comms/pt/comms.py --master-ip 127.0.0.1 --b 8 --e 64K --f 8 --n 3 --w 1 --z 1 --c 1"
            f" --data-types float32 --backend gloo --device cpu {options}",
            commit="1e115ffc62c6d048405d9b963191736c13811b1d", ranks=ranks, prepare=named_param,
            shows=r"COMMS-RES-\w+-float32 +\d+",
        )
        for name, ranks, options in (
            ("11 collectives", (2, 3), f"--collective {COLLECTIVES}"),
            ("point to point", (2,), "--pt2pt one2one --src-ranks 0 --dst-ranks 1"),
        )
    ),
    Program(
        "Horovod: test_torch.py", "horovod/horovod",
        f"-m pytest -q --color=no -p no:cacheprovider -c pytest.ini -k '{MUON}' test/parallel/test_torch.py",
        commit="2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a", groups=False, prepare=horovods_helpers,
        edits={"^import horovod.torch as hvd": "import trainers.horovod.torch as hvd"}, shows=r"^\d+ passed.*(?= in )",
    ),
]  # fmt: skip
