"""The plan's columns: rows out of documents, and what they refuse."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import CacheError
from shards.schema import PlanArrays
from tests.shards.caches import CacheShape, make_manifest, make_plan


@settings(derandomize=True)
@given(st.builds(CacheShape, num_rows=st.integers(1, 8), row_tokens=st.integers(1, 40), seed=st.integers(0, 10_000)))
def test_rows_hold_their_documents_and_nothing_else(shape: CacheShape) -> None:
    plan = make_plan(shape)
    expected = {
        "input_ids": np.zeros((shape.num_rows, shape.row_tokens), np.int32),
        "position_ids": np.zeros((shape.num_rows, shape.row_tokens), np.int32),
        "document_ids": np.full((shape.num_rows, shape.row_tokens), -1, np.int32),
        "loss_mask": np.zeros((shape.num_rows, shape.row_tokens), np.uint8),
        "source_ids": np.zeros((shape.num_rows, shape.row_tokens), np.uint8),
    }
    token = 0
    for document in range(len(plan.document_row)):
        for position in range(plan.document_tokens[document]):
            slot = plan.document_row[document], plan.document_start[document] + position
            expected["input_ids"][slot] = plan.token_ids[token]
            expected["position_ids"][slot] = position
            expected["document_ids"][slot] = document
            expected["loss_mask"][slot] = plan.loss_mask[token]
            expected["source_ids"][slot] = plan.document_source[document]
            token += 1
    for row in range(shape.num_rows):
        arrays = vars(plan.row_arrays(row, shape.row_tokens))
        assert arrays.keys() == expected.keys()
        for name, values in arrays.items():
            assert values.dtype == expected[name].dtype
            np.testing.assert_array_equal(values, expected[name][row])
        starts = plan.document_start[plan.row_documents(row)]
        assert (np.diff(starts) > 0).all()


def test_a_written_plan_is_mapped_not_loaded(tmp_path: Path) -> None:
    plan = make_plan(CacheShape())
    plan.write(tmp_path)
    read = PlanArrays.read(tmp_path)
    for field in dataclasses.fields(plan):
        assert isinstance(getattr(read, field.name), np.memmap)
        np.testing.assert_array_equal(getattr(read, field.name), getattr(plan, field.name))


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("token_ids", np.zeros(3, np.int32), r"token_ids has 3 elements, expected \d+"),
        ("document_row", np.zeros((2, 2), np.int64), r"document_row is int64 \[2, 2\], expected int64 \[any\]"),
        ("document_split", np.zeros(2, np.int64), r"document_split is int64 \[2\], expected uint8"),
    ],
)
def test_unfit_columns_are_refused(column: str, values: np.ndarray, reason: str) -> None:
    with pytest.raises(CacheError, match=reason):
        dataclasses.replace(make_plan(CacheShape()), **{column: values})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_rows": 6}, r"plan\.num_rows is 6, the plan's columns say 5"),
        ({"num_documents": 1}, r"plan\.num_documents is 1"),
        ({"num_heldout_documents": 0}, r"plan\.num_heldout_documents is 0"),
        ({"num_tokens": 1}, r"plan\.num_tokens is 1"),
        ({"sources": ("chats",)}, "documents of source 1, the manifest names 1"),
    ],
)
def test_a_manifest_of_another_plan_is_refused(change: dict[str, object], reason: str) -> None:
    plan = make_plan(CacheShape())
    sizes = make_manifest(CacheShape(), plan).plan
    plan.check(sizes)
    with pytest.raises(CacheError, match=reason):
        plan.check(dataclasses.replace(sizes, **change))


def test_negative_places_are_refused() -> None:
    plan = make_plan(CacheShape())
    rows = plan.document_row.copy()
    rows[0] = -1
    with pytest.raises(CacheError, match="negative"):
        dataclasses.replace(plan, document_row=rows).check(make_manifest(CacheShape(), plan).plan)
