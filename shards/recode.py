"""`python -m shards recode`: the same cache in another codec.

Plan, rows and shards stay what they are; states are decoded and encoded again. What the new codec loses of what the old
one had is measured on the way, on one token in sixteen; between `bf16` and `bf16+zstd` it is nothing.
"""

import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shards.codec import CODECS, Encoded
from shards.derive import Blueprint, States, check_outside, make_cache
from shards.encoding import Values, encode_document
from shards.errors import UsageError
from shards.record import Quarantined
from shards.schema import FINAL_HIDDEN, hidden_name, scales_name
from shards.source import Places, Source, SourceDocuments

MEASURED_STEP = 16


def recode(cache: Path, destination: Path, codec: str) -> dict[str, Any]:
    """Make `destination` from `cache`; return what `--json` prints."""
    check_outside(destination, cache)
    source = Source.open(cache)
    before = source.manifest
    if codec == before.cache.codec:
        raise UsageError(f"{cache} is in {codec} already: there is nothing to recode")
    step = f"recoded from {before.cache.codec} to {codec}, source {before.seal[:16]}"
    manifest = replace(before, cache=replace(before.cache, codec=codec), history=(*before.history, step))
    losses = Losses()
    made = make_cache(
        destination,
        Blueprint(
            manifest=manifest,
            plan=source.plan,
            target=cache,
            open_documents=lambda: RecodedDocuments(source, codec, losses),
        ),
    )
    return made.to_json() | {"codec": codec, "loss": losses.to_json()}


def describe_losses(losses: dict[str, dict[str, float]]) -> list[str]:
    """A line for each array; one for all of them where nothing is lost."""
    if losses and not any(loss["max"] for loss in losses.values()):
        return ["exact: nothing is lost"]
    return [
        f"{name}: {loss['mean']:.2%} of a token is lost, {loss['max']:.2%} at most ({loss['tokens']:,} tokens measured)"
        for name, loss in losses.items()
    ]


@dataclass
class Loss:
    """The errors ‖x − x̂‖ / ‖x‖ of single tokens at one layer, where x is what the source holds."""

    num_tokens: int = 0
    total: float = 0.0
    max: float = 0.0

    def add(self, values: np.ndarray, decoded: np.ndarray) -> None:
        """float32 [tokens, H] before and after."""
        norms = np.linalg.norm(values.astype(np.float64), axis=-1)
        errors = np.linalg.norm(values.astype(np.float64) - decoded, axis=-1) / np.where(norms, norms, 1.0)
        self.num_tokens += len(errors)
        self.total += float(errors.sum())
        self.max = max(self.max, float(errors.max(initial=0.0)))


class Losses:
    """Of all arrays, from all threads."""

    def __init__(self) -> None:
        self._by_array: defaultdict[str, Loss] = defaultdict(Loss)  # in the order of the layers, as they come
        self._lock = threading.Lock()

    def add(self, name: str, values: np.ndarray, decoded: np.ndarray) -> None:
        with self._lock:
            self._by_array[name].add(values, decoded)

    def to_json(self) -> dict[str, dict[str, float]]:
        return {
            name: {"mean": loss.total / loss.num_tokens, "max": loss.max, "tokens": loss.num_tokens}
            for name, loss in self._by_array.items()
        }


class RecodedDocuments:
    """The states of the documents of `source` in another codec."""

    def __init__(self, source: Source, codec: str, losses: Losses) -> None:
        self._documents = SourceDocuments([source], Places.same(source.plan), source.manifest.cache)
        self._before, self._after = CODECS[source.manifest.cache.codec], CODECS[codec]
        layers = source.manifest.cache.layers
        self._layers = {hidden_name(layer): layer for layer in layers}
        if source.manifest.cache.final_hidden:
            self._layers[FINAL_HIDDEN] = source.manifest.target.num_layers
        self._losses = losses

    def read(self, document: int) -> States | Quarantined:
        stored = self._documents.read(document)
        if isinstance(stored, Quarantined):
            return stored
        layers = {name: (layer, self._values(stored, name)) for name, layer in self._layers.items()}
        num_tokens = len(next(iter(stored.values())))
        recoded = encode_document(self._after, document, num_tokens, layers)
        if not isinstance(recoded, Quarantined):
            self._measure(num_tokens, layers, recoded)
        return recoded

    def close(self) -> None:
        self._documents.close()

    def _values(self, stored: States, name: str) -> Values:
        return lambda tokens: self._before.decode(_part(stored, name, tokens))

    def _measure(self, num_tokens: int, layers: dict[str, tuple[int, Values]], recoded: States) -> None:
        tokens = slice(0, num_tokens, MEASURED_STEP)
        for name, (_, values) in layers.items():
            self._losses.add(name, values(tokens), self._after.decode(_part(recoded, name, tokens)))


def _part(states: States, name: str, tokens: slice) -> Encoded:
    scales = states.get(scales_name(name))
    return Encoded(states[name][tokens], None if scales is None else scales[tokens])
