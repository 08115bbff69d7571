"""What a cache holds, as one picture: `python -m shards stats CACHE --plot FILE.png`.

From the same few files as the figures. matplotlib is imported when it is needed: no other command wants it.
"""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shards.errors import UsageError
from shards.manifest import Manifest
from shards.record import ShardRecord
from shards.schema import FINAL_HIDDEN, PLAN_DIRECTORY, PlanArrays, hidden_name, published_shards
from shards.stats import combine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPLITS = ("training", "held out")  # by document_split
SIZE_INCHES = (13, 11)
NUM_BINS = 50


def plot_statistics(cache: Path, file: Path) -> None:
    """Draw the cache's statistics into `file`, a PNG that does not exist yet."""
    check_destination(file)
    import matplotlib as mpl

    mpl.use("Agg")  # no screen
    from matplotlib import pyplot as plt

    manifest = Manifest.read(cache)
    plan = PlanArrays.read(cache / PLAN_DIRECTORY)
    plan.check(manifest.plan)
    records = [ShardRecord.read(cache, manifest, shard) for shard in sorted(published_shards(cache, manifest))]
    figure, axes = plt.subplots(3, 2, figsize=SIZE_INCHES, layout="constrained")
    figure.suptitle(f"{cache}: {manifest.target.path}, {manifest.cache.codec}, {len(records)} shards")
    draw_lengths(axes[0, 0], plan)
    draw_fill(axes[0, 1], manifest, plan)
    draw_states(axes[1, 0], manifest, records, is_outlier=False)
    draw_states(axes[1, 1], manifest, records, is_outlier=True)
    draw_sources(axes[2, 0], manifest, plan)
    draw_left_out(axes[2, 1], manifest, records)
    figure.savefig(file)
    plt.close(figure)


def check_destination(file: Path) -> None:
    if file.suffix != ".png":
        raise UsageError(f"--plot {file}: the name must end with .png")
    if file.exists():
        raise UsageError(f"--plot {file}: there is such a file already, and nothing is overwritten")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--plot {file}: there is no directory {file.parent}")


def draw_lengths(axes: "Axes", plan: PlanArrays) -> None:
    axes.set(title="document lengths", xlabel="tokens", ylabel="documents")
    axes.hist(plan.document_tokens, bins=NUM_BINS)


def draw_fill(axes: "Axes", manifest: Manifest, plan: PlanArrays) -> None:
    axes.set(title="fill of the rows", xlabel="share of slots that are tokens", ylabel="rows")
    tokens = np.bincount(plan.document_row, plan.document_tokens, minlength=manifest.plan.num_rows)
    axes.hist(tokens / manifest.cache.row_tokens, bins=NUM_BINS, range=(0, 1))


def draw_states(axes: "Axes", manifest: Manifest, records: list[ShardRecord], *, is_outlier: bool) -> None:
    """The rms of each array; or how far its largest channel sticks out."""
    names = [hidden_name(layer) for layer in manifest.cache.layers] + [FINAL_HIDDEN] * manifest.cache.final_hidden
    figures = [combine(records, name) for name in names]
    if is_outlier:
        heights = [of["max_abs"] / of["rms"] if of["rms"] else 0.0 for of in figures]
        axes.set(title="outlier channels", ylabel="largest magnitude / rms")
    else:
        heights = [of["rms"] for of in figures]
        axes.set(title="size of hidden states", ylabel="rms")
    axes.bar(names, heights)
    if any(heights):
        axes.set_yscale("log")
    axes.tick_params(axis="x", rotation=90)


def draw_sources(axes: "Axes", manifest: Manifest, plan: PlanArrays) -> None:
    axes.set(title="tokens by source and split", xlabel="tokens")
    sources, left = manifest.plan.sources, np.zeros(len(manifest.plan.sources))
    for split, name in enumerate(SPLITS):
        own = plan.document_split == split
        tokens = np.bincount(plan.document_source[own], plan.document_tokens[own], minlength=len(sources))
        axes.barh(sources, tokens, left=left, label=name)
        left += tokens
    axes.legend()


def draw_left_out(axes: "Axes", manifest: Manifest, records: list[ShardRecord]) -> None:
    axes.set(title="documents left out, truncated, in quarantine", xlabel="documents")
    not_finite = Counter(entry.layer for record in records for entry in record.quarantined)
    counts = {f"left out: {reason}": count for reason, count in manifest.plan.num_left_out.items()}
    counts |= {"truncated": manifest.plan.num_truncated}
    counts |= {f"quarantine: layer {layer} not finite": not_finite[layer] for layer in sorted(not_finite)}
    axes.barh(list(counts), list(counts.values()))
