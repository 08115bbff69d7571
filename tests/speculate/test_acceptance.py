"""Numbers from rounds, counted by hand."""

from speculate.acceptance import Acceptance, measure
from speculate.decode import Round


def rounds(*pairs: tuple[int, int]) -> list[Round]:
    return [Round(num_committed=committed, num_accepted=accepted) for committed, accepted in pairs]


def test_two_answers() -> None:
    """Blocks of 4: the first answer gains 4 + 1 + 1 in three rounds, the second 2, cut short after two accepted."""
    assert measure([rounds((4, 3), (1, 0), (1, 0)), rounds((2, 2))], 4) == Acceptance(
        acceptance_length_macro=(6 / 3 + 2 / 1) / 2,
        acceptance_length_pooled=8 / 4,
        rounds=4,
        histogram=[2, 1, 0, 1],
        per_slot=[2 / 4, 2 / 4, 1 / 3],  # the round that was cut short does not judge slot 3
    )


def test_macro_and_pooled_differ_where_answers_do() -> None:
    acceptance = measure([rounds((3, 2)), rounds((1, 0), (1, 0), (1, 0))], 3)
    assert acceptance.acceptance_length_macro == (3 + 1) / 2
    assert acceptance.acceptance_length_pooled == 6 / 4


def test_answers_without_rounds_have_no_mean() -> None:
    assert measure([[], rounds((2, 1))], 2).acceptance_length_macro == 2.0
    assert measure([[]], 3) == Acceptance(
        acceptance_length_macro=None,
        acceptance_length_pooled=None,
        rounds=0,
        histogram=[0, 0, 0],
        per_slot=[None, None],
    )
