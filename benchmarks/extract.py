"""`python -m benchmarks.extract CONFIG`: extraction at the shapes of a config against the bare forward of its target.

Random weights, made on the device, and random documents of log-normal lengths; everything else is the stage's own.
Correctness first: what is stored must be what the bare forward of the same rows gives, within the codec's bounds, and
what each document gives alone, within the rounding of the dtype. Then, in one run, the rates of the bare forward with
every layer and the head, of the layers that the stage needs, and of the stage with encoding, copying and writing.
"""

import argparse
import dataclasses
import json
import math
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.random_target import MASK_ID, MIN_VOCAB_SIZE, SHAPES, TargetShape, write_model_config
from extract.attention import BY_MASK, attention_of
from extract.encode import encode
from extract.job import Job
from extract.progress import Progress
from extract.storing import Storing
from extract.target import Target, num_run_layers, read_architecture
from extract.worker import make_shards
from shards.codec import CODECS, Encoded
from shards.documents import Batch, Collector, Document, Limits
from shards.errors import RunError, UsageError, run_command
from shards.manifest import Identity, Manifest
from shards.plan import make_plan
from shards.reader import CacheReader
from shards.schema import NO_DOCUMENT, PLAN_DIRECTORY, PlanArrays, hidden_name, scales_name
from shards.writer import new_cache, publish_cache

CODEC_BOUNDS = {"bf16": 2**-8, "bf16+zstd": 2**-8, "int8": 0.02, "int4": 0.2}  # of a token's error, relative
DTYPE_BOUNDS = {"float32": 1e-3, "bfloat16": 0.2}  # the same, of sums in another order through all layers
NUM_BARE_ROWS = 5  # timed, after one that is not
PRODUCT_SHAPES = {"cuda": (8192, 4096, 12_288), "cpu": (512, 512, 512)}  # of the product whose rate is the measure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.extract", description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file of configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--directory", type=Path, help="where the cache is written and removed (default: a temporary)")
    parser.add_argument("--rows", type=int, default=60, help="rows through the stage (default: %(default)s)")
    parser.add_argument("--mean-tokens", type=float, default=948.0, help="of a document (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    return run_command(lambda: run(parser.parse_intermixed_args()))


def run(arguments: argparse.Namespace) -> int:
    job = Job.load(arguments.config, arguments.overrides)
    shape = shape_of(job)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=arguments.directory) as directory:
        write_model_config(Path(directory, "target"), shape, getattr(torch, job.target.dtype))
        target = dataclasses.replace(job.target, path=f"{directory}/target", mask_token_id=MASK_ID)
        job = dataclasses.replace(job, target=target, directory=Path(directory, "cache"))
        begin_cache(job, num_tokens=arguments.rows * job.cache.row_tokens, mean_tokens=arguments.mean_tokens)
        result = environment(device) | measure(job, device)
    print(json.dumps(result, indent=1) if arguments.json else "\n".join(f"{k:44}{v}" for k, v in result.items()))
    return 0


def shape_of(job: Job) -> TargetShape:
    """The shape of benchmarks.random_target with the sizes of the config's target."""
    sizes = (job.target.hidden_size, job.target.num_layers, job.target.vocab_size)
    for shape in SHAPES.values():
        if (shape.hidden_size, shape.num_layers, shape.vocab_size) == sizes:
            return shape
    raise UsageError(f"no shape of {', '.join(SHAPES)} has the hidden_size, num_layers and vocab_size {sizes}")


def begin_cache(job: Job, *, num_tokens: int, mean_tokens: float, seed: int = 0) -> None:
    """A cache without shards, whose plan is of random documents, as many as fill about `num_tokens`."""
    rng = np.random.default_rng(seed)
    documents: list[Document] = []
    while num_tokens > 0:
        length = min(job.cache.row_tokens, max(8, int(rng.lognormal(math.log(mean_tokens) - 0.5))))
        ids = rng.integers(MIN_VOCAB_SIZE, job.target.vocab_size, length, dtype=np.int32)
        mask = np.ones(length, np.uint8)
        documents.append(Document(record=len(documents), source="random", token_ids=ids, loss_mask=mask))
        num_tokens -= length
    data = dataclasses.replace(job.data, holdout_fraction=0.0)
    collector = Collector(job.directory.parent)
    collector.add(Batch.of(documents, Limits.of(job.target, data, job.cache), data.seed))
    tokenised = collector.finish()
    plan, layout = make_plan(tokenised, job.target, data, job.cache)
    identity = Identity(target="", tokenizer="", chat_template="", data="")
    manifest = Manifest(
        target=job.target, data=data, cache=job.cache, identity=identity, plan=plan, checksums={}, software={}
    )
    with new_cache(job.directory) as staging:
        layout.arrays(tokenised, staging).write(staging / PLAN_DIRECTORY)
        publish_cache(job.directory, staging, manifest)


def measure(job: Job, device: torch.device) -> dict[str, Any]:
    manifest = Manifest.read(job.directory)
    plan = PlanArrays.read(job.directory / PLAN_DIRECTORY)
    architecture = read_architecture(job.target, job.cache)
    name = attention_of(type(architecture.skeleton), architecture.text_config, architecture.dtype, device)
    model = random_model(architecture.config, architecture.dtype, name, device)
    rows = [row_tensors(plan, row, job.cache.row_tokens) for row in range(min(NUM_BARE_ROWS, manifest.plan.num_rows))]
    target = Target(architecture, job.cache, model)
    row_tokens = job.cache.row_tokens
    lengths = [plan.document_tokens[plan.row_documents(row)] for row in range(len(rows))]

    def rate(forward: Callable[..., Any]) -> float:
        return row_tokens / statistics.median(time_rows(forward, rows, device))

    def whole(*row: Tensor) -> None:
        model(**target.arguments(*row))

    def causal(ids_RT: Tensor, *_: Tensor) -> None:
        model(ids_RT.to(device), use_cache=False)

    with torch.inference_mode():
        full = rate(whole)
        with attention(model, BY_MASK):
            full_causal = rate(causal)
            alone = states_alone(model, job, plan, row=0)
        full_flop = flop_per_token(model, architecture.text_config, lengths, row_tokens)
        del model.get_decoder().layers[num_run_layers(architecture, job.cache) :]
        skipped = rate(target.run)
        model.lm_head = nn.Identity()
        flop = flop_per_token(model, architecture.text_config, lengths, row_tokens)
        packed = {layer: states[0] for layer, states in target.run(*rows[0]).items()}
    encoding_s = statistics.median(
        time_rows(lambda: [encode(job.cache.codec, states) for states in packed.values()], [()] * NUM_BARE_ROWS, device)
    )
    stage = run_stage(job, manifest, plan, target, device)
    checks = check(job, plan, packed=packed, alone=alone)
    product = product_tflops(architecture.dtype, device)
    return checks | {
        "tokens": f"{manifest.plan.num_rows} rows of {row_tokens}, {manifest.plan.num_documents} documents",
        "codec": job.cache.codec,
        "attention": name,
        "bare_tokens_per_second": round(full, 1),
        "bare_one_document_a_row_tokens_per_second": round(full_causal, 1),
        "bare_needed_layers_tokens_per_second": round(skipped, 1),
        "stage_tokens_per_second": round(stage["tokens_per_second"], 1),
        "ratio_to_bare": round(stage["tokens_per_second"] / full, 4),
        "ratio_to_bare_needed_layers": round(stage["tokens_per_second"] / skipped, 4),
        "row_ms": round(row_tokens / stage["tokens_per_second"] * 1e3, 3),
        "encoding_ms_per_row": round(encoding_s * 1e3, 3),
        "time_outside_target": round(1 - stage["tokens_per_second"] / skipped, 4),
        "bare_model_tflops": round(full * full_flop / 1e12, 4),
        "stage_model_tflops": round(stage["tokens_per_second"] * flop / 1e12, 4),
        "product_tflops": round(product, 4),
        "stage_share_of_product_rate": round(stage["tokens_per_second"] * flop / 1e12 / product, 4),
        **stage["rest"],
    }


def random_model(config: Any, dtype: torch.dtype, attention: str, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    yield
    model.set_attn_implementation(before)


def row_tensors(plan: PlanArrays, row: int, row_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token, position and document ids [1, T] of a row, as `Target.run` takes them."""
    slots = plan.row_arrays(row, row_tokens)
    ids, positions, documents = (
        torch.from_numpy(getattr(slots, name)).long()[None] for name in ("input_ids", "position_ids", "document_ids")
    )
    return ids, positions, documents


def time_rows(
    forward: Callable[..., Any], rows: list[tuple[Tensor, Tensor, Tensor]], device: torch.device
) -> list[float]:
    """Seconds of each row, after one that is not counted."""
    times_s = []
    for row in [rows[0], *rows]:
        synchronise(device)
        started_s = time.perf_counter()
        forward(*row)
        synchronise(device)
        times_s.append(time.perf_counter() - started_s)
    return times_s[1:]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_stage(job: Job, manifest: Manifest, plan: PlanArrays, target: Target, device: torch.device) -> dict[str, Any]:
    """All shards of the plan by the stage's own code, as one worker makes them."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    shards = range(manifest.plan.num_shards)
    with (
        Storing(job.directory, manifest, shards) as storing,
        Progress(job.directory, manifest, plan, is_shown=False) as progress,
    ):
        if device.type == "cuda":
            storing.page_lock()
        started_s = time.perf_counter()
        make_shards(job, manifest, plan, target, shards, storing, progress)
        seconds = time.perf_counter() - started_s
    num_bytes = sum(path.stat().st_size for path in job.directory.glob("shard-*/**/*") if path.is_file())
    own, children = (resource.getrusage(of).ru_maxrss * 1024 for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    rest = {
        "waiting_for_disk": round(storing.waited_s / seconds, 4),
        "write_gb_per_second": round(num_bytes / seconds / 1e9, 4),
        "host_memory_gb": round(own / 1e9, 2),
        "host_memory_of_writer_gb": round(children / 1e9, 2),
    }
    if device.type == "cuda":
        rest["peak_gpu_memory_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    return {"tokens_per_second": manifest.plan.num_rows * job.cache.row_tokens / seconds, "rest": rest}


def states_alone(model: PreTrainedModel, job: Job, plan: PlanArrays, *, row: int) -> dict[int, Tensor]:
    """Hidden states [tokens, H] by layer of the documents of a row, each run alone, one after the other."""
    ids_T = torch.from_numpy(plan.row_arrays(row, job.cache.row_tokens).input_ids).long().to(model.device)
    parts: dict[int, list[Tensor]] = {layer: [] for layer in job.cache.layers}
    for document in plan.row_documents(row):
        start, num_tokens = int(plan.document_start[document]), int(plan.document_tokens[document])
        output = model.get_decoder()(
            ids_T[None, start : start + num_tokens], output_hidden_states=True, use_cache=False
        )
        for layer, of_layer in parts.items():
            of_layer.append(output.hidden_states[layer + 1][0])
    return {layer: torch.cat(of_layer) for layer, of_layer in parts.items()}


def check(job: Job, plan: PlanArrays, *, packed: dict[int, Tensor], alone: dict[int, Tensor]) -> dict[str, float]:
    """The largest relative errors of stored tokens of row 0; raises RunError if one is beyond its bound."""
    codec = CODECS[job.cache.codec]
    used = plan.row_arrays(0, job.cache.row_tokens).document_ids != NO_DOCUMENT
    errors = {"error_of_codec": 0.0, "error_against_documents_alone": 0.0}
    with CacheReader(job.directory) as reader:
        for layer in job.cache.layers:
            names = [hidden_name(layer), *([scales_name(hidden_name(layer))] if codec.is_rotated else [])]
            stored = codec.decode(Encoded(*reader.read_arrays(0, names).values()))[used]
            for name, truth in (
                ("error_of_codec", packed[layer][used]),
                ("error_against_documents_alone", alone[layer]),
            ):
                values = truth.float().cpu().numpy()
                error = np.linalg.norm(stored - values, axis=-1) / np.linalg.norm(values, axis=-1)
                errors[name] = max(errors[name], float(error.max()))
    bound = CODEC_BOUNDS[job.cache.codec]
    bounds = {"error_of_codec": bound, "error_against_documents_alone": bound + DTYPE_BOUNDS[job.target.dtype]}
    for name, largest in bounds.items():
        if not errors[name] <= largest:
            raise RunError(
                f"stored features are wrong: {name} is {errors[name]:.3g} for a token, at most {largest:.3g}"
            )
    return errors


def flop_per_token(model: PreTrainedModel, config: Any, lengths: list[np.ndarray], row_tokens: int) -> float:
    """Floating-point operations of all linear layers, and of attention to the earlier tokens of each document."""
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    pairs = sum(int((of_row.astype(np.int64) ** 2).sum()) for of_row in lengths) / 2 / (len(lengths) * row_tokens)
    num_layers = len(model.get_decoder().layers)
    return 2 * weights + 4 * pairs * config.num_attention_heads * config.head_dim * num_layers


def product_tflops(dtype: torch.dtype, device: torch.device) -> float:
    m, k, n = PRODUCT_SHAPES[device.type]
    a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((m, k), (n, k)))

    def multiply() -> None:
        for _ in range(10):
            torch.mm(a, b.t())

    times_s = time_rows(multiply, [()] * NUM_BARE_ROWS, device)
    return 10 * 2 * m * k * n / statistics.median(times_s) / 1e12


def environment(device: torch.device) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
