"""What the tests of tools share: a cache's documents as any zarr reader finds them, and tools as a user runs them."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from shards.manifest import Manifest
from shards.record import Quarantined
from shards.schema import PlanArrays
from shards.verify import verify
from shards.writer import mark_complete, write_shard
from tests.shards.caches import CacheShape, make_manifest, make_plan, make_rows, start_cache

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One document, from the arrays of its shard."""

    source: str
    is_heldout: bool
    row: int
    input_ids: list[int]
    loss_mask: list[int]
    position_ids: list[int]
    states: dict[str, np.ndarray]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shards", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def stored_documents(cache: Path) -> dict[int, Stored]:
    """By record. Nothing of the product's reader is used."""
    manifest = json.loads((cache / "manifest.json").read_text())
    records = np.load(cache / "plan/document_record.npy")
    splits = np.load(cache / "plan/document_split.npy")
    found = {}
    for shard in sorted(cache.glob("shard-*")):
        arrays = {
            str(path.parent.relative_to(shard)): zarr.open_array(path.parent, mode="r")[...]
            for path in shard.rglob("zarr.json")
            if json.loads(path.read_text())["node_type"] == "array"
        }
        slots = {name: arrays.pop(name) for name in list(arrays) if arrays[name].ndim < 3}
        for row, document_ids_T in enumerate(slots["document_ids"]):
            for document in np.unique(document_ids_T[document_ids_T >= 0]):
                tokens = np.flatnonzero(document_ids_T == document)
                assert records[document] not in found
                found[int(records[document])] = Stored(
                    source=manifest["plan"]["sources"][slots["source_ids"][row, tokens[0]]],
                    is_heldout=bool(splits[document]),
                    row=int(slots["row_ids"][row]),
                    input_ids=slots["input_ids"][row, tokens].tolist(),
                    loss_mask=slots["loss_mask"][row, tokens].tolist(),
                    position_ids=slots["position_ids"][row, tokens].tolist(),
                    states={name: values[row, tokens] for name, values in arrays.items()},
                )
    return found


def ordered_plan(shape: CacheShape) -> PlanArrays:
    """As extraction numbers documents: row by row, slot by slot."""
    plan = make_plan(shape)
    order = np.lexsort((plan.document_start, plan.document_row))
    pieces = [slice(*plan.token_offsets[d : d + 2]) for d in order]
    columns = {name: column[order] for name, column in vars(plan).items() if name.startswith("document_")}
    tokens = {name: np.concatenate([getattr(plan, name)[p] for p in pieces]) for name in ("token_ids", "loss_mask")}
    return PlanArrays(**columns, **tokens)


def make_ordered_cache(
    path: Path, shape: CacheShape, *, quarantined: tuple[int, ...] = (), **identity: str
) -> Manifest:
    """A whole cache of random content, with some documents in quarantine and parts of the identity as given."""
    plan = ordered_plan(shape)
    manifest = make_manifest(shape, plan)
    manifest = replace(manifest, identity=replace(manifest.identity, **identity))
    manifest = start_cache(path, shape, plan, manifest)
    for shard in range(manifest.plan.num_shards):
        rows = make_rows(shape, manifest, plan, shard)
        own = [document for document in quarantined if document in rows.document_ids]
        for values in (rows.loss_mask, *rows.hidden.values(), *rows.scales.values(), rows.final_hidden):
            if values is not None:
                values[np.isin(rows.document_ids, own)] = 0
        entries = tuple(Quarantined(document=document, layer=shape.layers[-1], position=0) for document in own)
        write_shard(path, manifest, shard, replace(rows, quarantined=entries))
    mark_complete(path, manifest)
    return manifest


def faults(cache: Path) -> list[str]:
    return [fault for part in verify(cache, Manifest.read(cache)) for fault in part.faults]


def history(cache: Path) -> list[str]:
    return json.loads((cache / "manifest.json").read_text())["history"]


def report(*arguments: object) -> dict[str, Any]:
    """What a tool that is to succeed prints with --json."""
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(*arguments: object, code: int = 2) -> str:
    """The one sentence with which a tool ends."""
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("error: ").rstrip()
