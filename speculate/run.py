"""Measure one drafter on one target: every prompt decoded plainly and speculatively, compared, and counted."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from extract.tokenise import Encoder
from shards.durable import write_json
from shards.errors import RunError, UsageError
from shards.sections import SpeculateConfig
from speculate.acceptance import measure
from speculate.checkpoint import DraftCheckpoint
from speculate.decode import Decoded, count_matching, decode_plainly, decode_speculatively
from speculate.drafting import BlockDrafter
from speculate.prompts import Prompt, read_prompts
from speculate.report import Difference, Report, describe, describe_difference
from speculate.target import LiveTarget, check_match, read_architecture


@dataclass(frozen=True, kw_only=True)
class Job:
    target: Path
    dtype: str | None  # None: the checkpoint's own, float32 on a CPU
    drafter: Path
    speculate: SpeculateConfig
    json: Path | None


def run(job: Job) -> None:
    """Decode, print the table, write the JSON; raise RunError when speculation changed an answer."""
    if job.json is not None:
        check_writable(job.json)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = DraftCheckpoint.read(job.drafter)
    architecture = read_architecture(job.target, job.dtype, device)
    check_match(architecture, checkpoint)
    prompts = read_prompts(Path(job.speculate.prompts), job.speculate.num_prompts, Encoder.load(job.target))
    drafter = checkpoint.load_drafter(device, architecture.dtype)
    target = LiveTarget.load(architecture, checkpoint, device)
    head = target.head(checkpoint)

    answers, differences = [], []
    started = time.perf_counter()
    for i, prompt in enumerate(tqdm(prompts, unit="prompt", dynamic_ncols=True, disable=not sys.stderr.isatty())):
        own_ids = decode_plainly(target, prompt.token_ids, job.speculate.max_new_tokens)
        block_drafter = BlockDrafter(drafter, head, checkpoint.mask_token_id)
        answer = decode_speculatively(target, block_drafter, prompt.token_ids, job.speculate.max_new_tokens)
        answers.append(answer)
        differences += find_differences(target, i, prompt, own_ids, answer, job.speculate.max_new_tokens)
        if not sys.stderr.isatty():  # a log has lines where a terminal has a bar
            counts = f"{len(answer.token_ids)} tokens in {len(answer.rounds)} rounds"
            seconds_left = (time.perf_counter() - started) / (i + 1) * (len(prompts) - i - 1)
            print(f"prompt {i + 1}/{len(prompts)}: {counts}  ETA {tqdm.format_interval(seconds_left)}", flush=True)

    report = Report(
        target=str(job.target),
        drafter=str(job.drafter),
        device=str(device),
        dtype=str(architecture.dtype).removeprefix("torch."),
        block_size=checkpoint.drafter.block_size,
        max_new_tokens=job.speculate.max_new_tokens,
        prompts=len(prompts),
        new_tokens=sum(len(answer.token_ids) for answer in answers),
        acceptance=measure([answer.rounds for answer in answers], checkpoint.drafter.block_size),
        differences=differences,
    )
    conclude(report, job.json)


def check_writable(path: Path) -> None:
    """Raise UsageError for a file that could not be written when all is done, which takes long."""
    if not path.parent.is_dir():
        raise UsageError(f"--json {path}: the directory {path.parent} does not exist")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--json {path} can't be written: name a file in a directory that can")


def conclude(report: Report, json: Path | None) -> None:
    """Print the table and write the JSON; raise RunError when an answer was changed."""
    print(describe(report))
    if json is not None:
        try:
            write_json(json, report.to_json())
        except OSError as error:
            raise RunError(f"--json {json} could not be written: {error.strerror}; the table above is all") from error
    if report.first_difference is not None:
        raise RunError(describe_difference(report.first_difference, report.dtype))


def find_differences(
    target: LiveTarget, i: int, prompt: Prompt, own_ids: list[int], answer: Decoded, max_new_tokens: int
) -> Iterator[Difference]:
    """All ties up to the first difference that is none. After a tie the target goes on with what the answer has."""
    while (difference := find_difference(target, i, prompt, own_ids, answer)) is not None:
        yield difference
        if not difference.is_tie:
            return
        begun = answer.token_ids[: difference.token + 1]
        own_ids = decode_plainly(target, prompt.token_ids, max_new_tokens, begun)


def find_difference(
    target: LiveTarget, i: int, prompt: Prompt, own_ids: list[int], answer: Decoded
) -> Difference | None:
    """The first difference, if any. Both answers end by the same rule: neither is just the beginning of the other."""
    token = count_matching(own_ids, answer.token_ids)
    if token == len(own_ids) == len(answer.token_ids):
        return None
    own, speculative = own_ids[token], answer.token_ids[token]
    logit_gap, tie_gap = target.logit_gap(prompt.token_ids + own_ids[:token], own, speculative)
    return Difference(
        prompt=i,
        where=prompt.where,
        token=token,
        own_token_id=own,
        speculative_token_id=speculative,
        logit_gap=logit_gap,
        tie_gap=tie_gap,
    )
