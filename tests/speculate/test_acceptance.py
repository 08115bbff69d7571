"""Numbers from rounds, counted by hand."""

from itertools import product

from speculate.acceptance import Acceptance, measure
from speculate.decode import Round


def rounds(*pairs: tuple[int, int]) -> list[Round]:
    return [Round(num_committed=committed, num_accepted=accepted) for committed, accepted in pairs]


def test_two_answers() -> None:
    """Blocks of 4: the first answer gains 4 + 1 + 1 in three rounds, the second 2, cut short after two accepted."""
    assert measure([rounds((4, 3), (1, 0), (1, 0)), rounds((2, 2))], 4) == Acceptance(
        acceptance_length_macro=(6 / 3 + 2 / 1) / 2,
        acceptance_length_pooled=8 / 4,
        acceptance_length_macro_interval=(2.0, 2.0),  # whichever are drawn
        acceptance_length_pooled_interval=(2.0, 2.0),
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
        acceptance_length_macro_interval=None,
        acceptance_length_pooled_interval=None,
        rounds=0,
        histogram=[0, 0, 0],
        per_slot=[None, None],
    )


def answer(*num_committed: int) -> list[Round]:
    return [Round(num_committed=count, num_accepted=count - 1) for count in num_committed]


def test_intervals_are_those_of_answers_drawn_anew() -> None:
    """Of three answers the same one is drawn three times in one of 27 draws, more than 2.5 %: the ends are answers."""
    acceptance = measure([answer(1, 1), answer(2, 4), answer(3), []], 4)
    assert acceptance.acceptance_length_macro_interval == (1.0, 3.0)
    assert acceptance.acceptance_length_pooled_interval == (1.0, 3.0)


def test_intervals_are_quantiles_of_all_draws() -> None:
    """All 5^5 draws are counted out. 3 sigma of the resampling are 0.7 % of the draws."""
    answers = [answer(1, 2), answer(1), answer(4, 1, 1), answer(2, 3), answer(3)]
    means = [sum(item.num_committed for item in rounds) / len(rounds) for rounds in answers]
    every_draw = sorted(sum(draw) / 5 for draw in product(means, repeat=5))
    low, high = measure(answers, 4).acceptance_length_macro_interval
    assert every_draw[int(0.018 * 3125)] <= low <= every_draw[int(0.032 * 3125)]
    assert every_draw[int(0.968 * 3125)] <= high <= every_draw[int(0.982 * 3125)]


def test_one_answer_has_no_interval() -> None:
    acceptance = measure([answer(1, 2), []], 4)
    assert acceptance.acceptance_length_macro == 1.5
    assert acceptance.acceptance_length_macro_interval is None
    assert acceptance.acceptance_length_pooled_interval is None
