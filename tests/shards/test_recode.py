"""Recoding: every value goes where it was, as the other codec has it; what is lost is told as it is."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shards.codec import CODECS, Encoded
from shards.manifest import Manifest
from shards.recode import describe_losses, recode
from shards.record import ShardRecord
from shards.schema import scales_name
from shards.writer import mark_complete, write_shard
from tests.reference import codec as reference
from tests.shards.caches import CacheShape, content, flip_bit, make_rows, start_cache
from tests.shards.derived import (
    faults,
    history,
    make_ordered_cache,
    ordered_plan,
    refusal,
    report,
    run,
    stored_documents,
)

PAIRS = list(itertools.permutations(CODECS, 2))
LOSSLESS = {"bf16", "bf16+zstd"}


def shape_of(codec: str) -> CacheShape:
    return CacheShape(num_rows=3, row_tokens=1024, layers=(1, 4), final_hidden=True, codec=codec)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A cache in each codec, with a document in quarantine."""
    paths = {codec: tmp_path_factory.mktemp("caches") / "cache" for codec in CODECS}
    for codec, path in paths.items():
        make_ordered_cache(path, shape_of(codec), quarantined=(2,))
    return paths


def decoded(codec: str, states: dict[str, np.ndarray], name: str) -> np.ndarray:
    return CODECS[codec].decode(Encoded(states[name], states.get(scales_name(name))))


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_everything_but_the_codes_stays_and_codes_are_those_of_the_decoded_values(
    caches: dict[str, Path], tmp_path: Path, before: str, after: str
) -> None:
    made = recode(caches[before], tmp_path / "cache", after)
    assert faults(tmp_path / "cache") == []
    old, new = content(caches[before]), content(tmp_path / "cache")
    for name in old:
        if name.startswith(("plan/", "target/", "complete")) or "_ids/" in name or "loss_mask/" in name:
            assert new[name] == old[name], name
    source, destination = stored_documents(caches[before]), stored_documents(tmp_path / "cache")
    assert source.keys() == destination.keys()
    for record, document in destination.items():
        if not any(values.any() for values in source[record].states.values()):  # in quarantine
            assert not any(values.any() for values in document.states.values())
            continue
        for name in ("hidden/1", "hidden/4", "final_hidden"):
            values = decoded(before, source[record].states, name)
            expected = CODECS[after].encode(values)
            np.testing.assert_array_equal(document.states[name], expected.codes)
            if expected.scales is not None:
                np.testing.assert_array_equal(document.states[scales_name(name)], expected.scales)
    assert made["quarantined_documents"] == 1
    if {before, after} <= LOSSLESS:
        assert describe_losses(made["loss"]) == ["exact: nothing is lost"]


def test_codes_are_those_of_the_specification(caches: dict[str, Path], tmp_path: Path) -> None:
    recode(caches["bf16"], tmp_path / "cache", "int8")
    source, destination = stored_documents(caches["bf16"]), stored_documents(tmp_path / "cache")
    for record in list(source)[::5]:
        token = decoded("bf16", source[record].states, "hidden/4")[0].tolist()
        codes, scales = reference.encode("int8", token)
        assert destination[record].states["hidden/4"][0].tobytes() == codes
        assert destination[record].states["scales/4"][0].tolist() == scales


def test_the_loss_is_the_error_of_every_sixteenth_token(caches: dict[str, Path], tmp_path: Path) -> None:
    made = recode(caches["bf16"], tmp_path / "cache", "int4")
    source, destination = stored_documents(caches["bf16"]), stored_documents(tmp_path / "cache")
    for name, loss in made["loss"].items():
        errors = []
        for record, document in source.items():
            values = decoded("bf16", document.states, name)[::16].astype(np.float64)
            if values.any():  # not the one in quarantine
                lost = values - decoded("int4", destination[record].states, name)[::16]
                errors += (np.linalg.norm(lost, axis=-1) / np.linalg.norm(values, axis=-1)).tolist()
        assert loss["tokens"] == len(errors)
        assert loss["max"] == max(errors)
        # Two sums of n float64 numbers in different order.
        assert loss["mean"] == pytest.approx(np.mean(errors), rel=len(errors) * 2.0**-52)
        assert 0.05 < loss["mean"] < 0.1  # DESIGN's table: 7.7 % for normal values


def test_what_the_cache_is_of_stays_and_its_history_grows(caches: dict[str, Path], tmp_path: Path) -> None:
    recode(caches["bf16"], tmp_path / "int4", "int4")
    recode(tmp_path / "int4", tmp_path / "int8", "int8")
    first, last = Manifest.read(caches["bf16"]), Manifest.read(tmp_path / "int8")
    assert (last.identity, last.plan, last.target, last.data) == (first.identity, first.plan, first.target, first.data)
    seal = json.loads((tmp_path / "int4/manifest.json").read_text())["seal"]
    assert history(caches["bf16"]) == []
    assert history(tmp_path / "int8")[0] == f"recoded from bf16 to int4, source {first.seal[:16]}"
    assert history(tmp_path / "int8")[1] == f"recoded from int4 to int8, source {seal[:16]}"


def test_a_document_that_the_new_codec_can_not_hold_goes_to_quarantine(tmp_path: Path) -> None:
    """The rotation of a token of the largest bf16 in all channels overflows."""
    shape = CacheShape(num_rows=1, rows_per_shard=1, row_tokens=1024, layers=(1, 4))
    plan = ordered_plan(shape)
    document = int(plan.document_tokens.argmax())
    position = int(plan.document_tokens[document]) - 1
    assert position > 512  # in the second piece
    manifest = start_cache(tmp_path / "bf16", shape, plan)
    rows = make_rows(shape, manifest, plan, 0)
    signs = np.array([reference.sign(channel) for channel in range(64)])  # so that the first sum is of equal numbers
    rows.hidden[4][0, plan.document_start[document] + position] = np.where(signs < 0, 0xFF7F, 0x7F7F)
    assert write_shard(tmp_path / "bf16", manifest, 0, rows)
    assert mark_complete(tmp_path / "bf16", manifest)

    made = report("recode", tmp_path / "bf16", tmp_path / "int8", "--codec", "int8")
    assert made["quarantined_documents"] == 1
    assert faults(tmp_path / "int8") == []
    (entry,) = ShardRecord.read(tmp_path / "int8", Manifest.read(tmp_path / "int8"), 0).quarantined
    assert (entry.document, entry.layer, entry.position) == (document, 4, position)
    stored = stored_documents(tmp_path / "int8")[int(plan.document_record[document])]
    assert not any(values.any() for values in stored.states.values())
    assert not any(stored.loss_mask)


def test_the_command_tells_what_is_lost(caches: dict[str, Path], tmp_path: Path) -> None:
    done = run("recode", caches["bf16"], tmp_path / "cache", "--codec", "int8")
    assert done.returncode == 0, done.stderr
    first, *losses = done.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'cache'} is complete: 2 shards, 2 of them new, 3 rows (2 for training), ")
    assert [line.split(":")[0] for line in losses] == ["hidden/1", "hidden/4", "final_hidden"]
    assert all("of a token is lost" in line for line in losses)


def test_what_can_not_be_recoded_is_refused_and_nothing_is_written(caches: dict[str, Path], tmp_path: Path) -> None:
    source = caches["bf16"]
    before = content(source)
    cache = tmp_path / "cache"
    assert "is in bf16 already" in refusal("recode", source, cache, "--codec", "bf16")
    assert "is not a cache" in refusal("recode", tmp_path / "none", cache, "--codec", "int8")
    assert "which is only read" in refusal("recode", source, source / "int8", "--codec", "int8")
    assert "which is only read" in refusal("recode", source, source, "--codec", "int8")
    assert run("recode", source, cache, "--codec", "int3").returncode == 2
    assert not cache.exists()
    assert content(source) == before

    cache.mkdir()
    (cache / "mine.txt").write_text("mine")
    assert "is not empty and holds no cache" in refusal("recode", source, cache, "--codec", "int8")
    assert content(cache) == {"mine.txt": b"mine"}


def test_no_cache_is_overwritten(caches: dict[str, Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    report("recode", caches["bf16"], cache, "--codec", "int8")
    before = content(cache)
    assert "holds this very cache, complete" in refusal("recode", caches["bf16"], cache, "--codec", "int8")
    assert "holds another cache" in refusal("recode", caches["bf16"], cache, "--codec", "int4")
    assert "holds another cache" in refusal("recode", caches["int4"], cache, "--codec", "int8")
    assert content(cache) == before


def test_shards_that_are_missing_are_made_again(caches: dict[str, Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    report("recode", caches["bf16"], cache, "--codec", "int8")
    before = content(cache)
    shutil.rmtree(cache / "shard-00001")
    assert report("recode", caches["bf16"], cache, "--codec", "int8")["new_shards"] == 1
    assert content(cache) == before


def test_a_damaged_source_ends_the_run_and_a_mended_one_goes_on(caches: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(caches["bf16"], tmp_path / "source"))
    flip_bit(source / "shard-00001/hidden/4/c/0/0/0", 8)
    message = refusal("recode", source, tmp_path / "cache", "--codec", "int8", code=1)
    assert message.startswith("shard-00001 hidden/4 row 2 tokens 0–511: crc32c is ")
    assert not (tmp_path / "cache/shard-00001").exists()
    assert not list((tmp_path / "cache").glob(".*"))
    flip_bit(source / "shard-00001/hidden/4/c/0/0/0", 8)
    report("recode", source, tmp_path / "cache", "--codec", "int8")
    recode(caches["bf16"], tmp_path / "whole", "int8")
    assert content(tmp_path / "cache") == content(tmp_path / "whole")


@pytest.mark.parametrize("name", ["plan/token_ids.npy", "target/head.json", "shard-00000/shard.json"])
def test_small_files_of_the_source_are_checked_first(caches: dict[str, Path], tmp_path: Path, name: str) -> None:
    source = Path(shutil.copytree(caches["bf16"], tmp_path / "source"))
    flip_bit(source / name, 8 * (source / name).stat().st_size - 20)
    assert name.rpartition("/")[2] in refusal("recode", source, tmp_path / "cache", "--codec", "int8")
    assert not (tmp_path / "cache").exists()


def test_an_unfinished_source_is_refused(caches: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(caches["bf16"], tmp_path / "source"))
    shutil.rmtree(source / "shard-00000")
    message = refusal("recode", source, tmp_path / "cache", "--codec", "int8")
    assert "lacks 1 of 2 shards, the first is number 0" in message
