"""The head loss against fp64: value, gradient, per-slot loss and correctness, in one chunk or in many."""

import pytest
import torch
from torch import Tensor

import train.head
from tests.reference import loss as reference
from train.head import head_loss

NUM_SLOTS, HIDDEN, VOCAB = 37, 24, 101
OPTIONS = {
    "plain": {},
    "multiplier": {"output_multiplier": 0.25},
    "softcap": {"final_logit_softcapping": 5.0},
    "both": {"output_multiplier": 3.0, "final_logit_softcapping": 30.0},
}


def problem(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, labels, weights (a third of them zero) and head; logits have about the deviation `scale`."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_SLOTS, HIDDEN, generator=generator).to(dtype)
    head = (scale * HIDDEN**-0.5 * torch.randn(VOCAB, HIDDEN, generator=generator)).to(dtype)
    labels = torch.randint(0, VOCAB, (NUM_SLOTS,), generator=generator)
    weights = torch.rand(NUM_SLOTS, generator=generator)
    weights[::3] = 0.0
    return hidden, labels, weights, head


def truth(
    hidden: Tensor, labels: Tensor, weights: Tensor, head: Tensor, options: dict
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ w·CE, its gradient and the logits, in fp64."""
    hidden = hidden.double().requires_grad_()
    renamed = {"multiplier": options.get("output_multiplier", 1.0), "softcap": options.get("final_logit_softcapping")}
    logits = reference.logits(hidden, head.double(), **renamed)
    total = reference.weighted_sum(logits, labels.tolist(), weights.double().tolist())
    [gradient] = torch.autograd.grad(total, hidden)
    return total.detach(), gradient, logits.detach()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("scale", [1.0, 20.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("chunk", [1 << 28, 5 * VOCAB, VOCAB - 1], ids=["one chunk", "five slots", "one slot"])
def test_fp32_equals_the_oracle(name, scale, chunk, monkeypatch):
    monkeypatch.setattr(train.head, "CHUNK_LOGITS", chunk)
    hidden, labels, weights, head = problem(torch.float32, scale)
    total, gradient, logits = truth(hidden, labels, weights, head, OPTIONS[name])
    hidden.requires_grad_()
    result = head_loss(hidden, labels, weights, head, **OPTIONS[name])
    [own_gradient] = torch.autograd.grad(result.weighted_sum, hidden)

    torch.testing.assert_close(result.weighted_sum.double(), total, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(own_gradient.double(), gradient, rtol=1e-4, atol=2e-6 * scale)
    expected = torch.stack([reference.cross_entropy(row, label) for row, label in zip(logits, labels, strict=True)])
    torch.testing.assert_close(result.cross_entropy_M.double(), expected, rtol=1e-5, atol=2e-6 * scale)
    assert torch.equal(result.is_correct_M, logits.argmax(dim=1) == labels)


@pytest.mark.parametrize("name", OPTIONS)
def test_bf16_is_no_further_from_the_truth_than_plain_bf16(name):
    """|ours − fp64| ≤ |torch's cross-entropy on bf16 logits − fp64|, gradient included, up to a rounding of bf16."""
    hidden, labels, weights, head = problem(torch.bfloat16, 4.0)
    total, gradient, _ = truth(hidden, labels, weights, head, OPTIONS[name])

    def distance(value: Tensor, own: Tensor) -> tuple[float, float]:
        return (value.double() - total).abs().item(), (own.double() - gradient).norm().item()

    ours = hidden.clone().requires_grad_()
    value = head_loss(ours, labels, weights, head, **OPTIONS[name]).weighted_sum
    our_distance = distance(value, *torch.autograd.grad(value, ours))

    naive = hidden.clone().requires_grad_()
    logits = naive @ head.T * OPTIONS[name].get("output_multiplier", 1.0)
    if softcap := OPTIONS[name].get("final_logit_softcapping"):
        logits = softcap * torch.tanh(logits / softcap)
    value = (weights * torch.nn.functional.cross_entropy(logits, labels, reduction="none")).sum()
    naive_distance = distance(value, *torch.autograd.grad(value, naive))

    assert our_distance[0] <= naive_distance[0] + 2**-8 * total
    assert our_distance[1] <= naive_distance[1] + 2**-8 * gradient.norm()


def test_the_gradient_scales_with_the_one_it_gets():
    hidden, labels, weights, head = problem(torch.float32, 1.0)
    hidden.requires_grad_()
    total = head_loss(hidden, labels, weights, head).weighted_sum
    [once] = torch.autograd.grad(total, hidden, retain_graph=True)
    [half] = torch.autograd.grad(0.5 * total, hidden)
    torch.testing.assert_close(half, 0.5 * once, rtol=0, atol=0)


def test_slots_without_weight_get_no_gradient():
    hidden, labels, weights, head = problem(torch.float32, 1.0)
    hidden.requires_grad_()
    [gradient] = torch.autograd.grad(head_loss(hidden, labels, weights, head).weighted_sum, hidden)
    assert (gradient[weights == 0] == 0).all()
    assert (gradient[weights > 0].abs().sum(dim=1) > 0).all()


def test_only_the_hidden_states_are_trained():
    hidden, labels, weights, head = problem(torch.float32, 1.0)
    total = head_loss(hidden.requires_grad_(), labels, weights, head.requires_grad_()).weighted_sum
    gradients = torch.autograd.grad(total, (hidden, head), allow_unused=True)
    assert gradients[1] is None


def test_ties_go_to_the_lowest_id():
    head = torch.zeros(5, 4)
    result = head_loss(torch.ones(2, 4), torch.tensor([0, 1]), torch.ones(2), head)
    assert result.is_correct_M.tolist() == [True, False]
