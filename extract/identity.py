"""Content hashes: what a cache was made from, independent of where that lies and what it is called."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from extract.files import expand
from extract.job import Job
from extract.tokenise import Encoder
from shards.errors import CacheError, UsageError
from shards.manifest import Identity, Manifest

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
TOKENIZER_FILES = (  # and what else the tokenizer's class names
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
TEMPLATE_FILE = "chat_template.jinja"


def compute_identity(folder: Path, tokenizer: PreTrainedTokenizerBase, data_files: Sequence[str]) -> Identity:
    return Identity(
        target=hash_target(folder),
        tokenizer=hash_tokenizer(folder, tokenizer),
        chat_template=hash_template(tokenizer),
        data=hash_data(data_files),
    )


def check_data(job: Job, manifest: Manifest) -> None:
    """Raise CacheError if the data is not what the cache of `job` was made from."""
    where = f"data.files {list(job.data.files)}"
    _check("data", manifest.identity.data, hash_data(job.data.files), where, job.directory)


def check_target(job: Job, manifest: Manifest, *, weights: bool = True) -> None:
    """Raise CacheError naming what of the target is not what the cache of `job` was made from, the cheapest first."""
    folder, made_with, where = Path(job.target.path), manifest.identity, f"target.path {job.target.path}"
    tokenizer = Encoder.load(folder).tokenizer
    _check("chat template", made_with.chat_template, hash_template(tokenizer), where, job.directory)
    _check("tokenizer", made_with.tokenizer, hash_tokenizer(folder, tokenizer), where, job.directory)
    if weights:
        print(f"extract: hashing {folder}, which was not read before or has changed", flush=True)
        _check("target's config.json or weights", made_with.target, hash_target(folder), where, job.directory)


def _check(what: str, made_with: str, found: str, where: str, cache: Path) -> None:
    if found != made_with:
        raise CacheError(
            f"the {what} of {where} is not what {cache} was made with: its sha256 is {found[:16]}…, {cache} has "
            f"{made_with[:16]}…; restore what it was made with, or extract into another directory (CACHE= of make, "
            "else --cache)"
        )


def hash_target(folder: Path) -> str:
    """Of config.json and all weight files, with their names, which an index refers to."""
    weights = sorted(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern))
    if not weights:
        raise UsageError(f"target.path is {folder}, which has no weights (*.safetensors or *.bin)")
    return _hash_named((path.name, hash_file(path)) for path in [folder / "config.json", *weights])


def hash_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the tokenizer's files; a chat template inside one is left out, it has a hash of its own."""
    return _hash_named((path.name, _hash_tokenizer_file(path)) for path in tokenizer_files(folder, tokenizer))


def tokenizer_files(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[Path]:
    """The files of `folder` that `tokenizer` can have come from, sorted; raise UsageError if there are none."""
    names = sorted({*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()})
    present = [folder / name for name in names if (folder / name).is_file()]
    if not present:
        raise UsageError(f"target.path is {folder}, which has no tokenizer in a file that is known: {', '.join(names)}")
    return present


def hash_template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.get_chat_template() if tokenizer.chat_template is not None else ""
    return hashlib.sha256(template.encode()).hexdigest()


def hash_data(files: Sequence[str]) -> str:
    """Of the files' contents as they lie there, in the order in which the config names them."""
    return _hash_named(("", hash_file(path)) for path in expand(files))


def hash_file(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _hash_tokenizer_file(path: Path) -> str:
    if path.name != "tokenizer_config.json":
        return hash_file(path)
    values = json.loads(path.read_text(encoding="utf-8"))
    values.pop("chat_template", None)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _hash_named(hashes: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{name}\0{digest}\n" for name, digest in hashes).encode()).hexdigest()
