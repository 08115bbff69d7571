"""Matrix products of the drafter, whose weight gradients go straight into the optimizer's buffer.

Autograd would make a tensor of every weight's gradient and then add it to the buffer: two more passes over memory
for each parameter. Here the product that gives the gradient writes it where it belongs.
"""

from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional

if find_spec("triton"):  # it comes with torch's CUDA builds only; train/preflight.py refuses fp8 without it
    from train.float8 import Float8, Scaled, multiply


class GradientSum:
    """Where the gradient of a parameter, or of some of a matrix's rows, is summed: a view of the flat buffer."""

    def __init__(self, view: Tensor) -> None:
        self.view = view
        self.is_fresh = False  # whether what the view holds is of an earlier step, to be replaced

    def add(self, gradient: Tensor) -> None:
        if self.is_fresh:
            self.view.copy_(gradient)
        else:
            self.view.add_(gradient)
        self.is_fresh = False

    def add_product(self, d_output_MO: Tensor, x_MI: Tensor) -> None:
        """Add d_outputᵀ·x, the gradient of a matrix with these inputs and outputs."""
        if self.is_fresh and self.view.dtype == x_MI.dtype:
            torch.mm(d_output_MO.t(), x_MI, out=self.view)
            self.is_fresh = False
        else:
            self.add(d_output_MO.t() @ x_MI)

    def add_float8_product(self, d_output_OM: "Scaled", x_IM: "Scaled") -> None:
        """The same of transposes in 8 bits."""
        if self.is_fresh and self.view.dtype == torch.bfloat16:
            multiply(d_output_OM, x_IM, is_fast=False, out=self.view)
            self.is_fresh = False
        else:
            self.add(multiply(d_output_OM, x_IM, is_fast=False))


class Linear(nn.Module):
    """x·Wᵀ + b for several projections of one input, whose outputs, of `out_features` each, lie side by side."""

    def __init__(self, in_features: int, *out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(sum(out_features), in_features))
        self.bias = nn.Parameter(torch.empty(sum(out_features))) if bias else None
        self.gradient_sums: list[GradientSum] = []  # one for each projection; empty: autograd returns the gradient
        self.float8: Float8 | None = None  # the weight in 8 bits, where products are to be in 8 bits

    def bind(self, gradient_OI: Tensor) -> None:
        """From now on, backward adds the weight's gradient to `gradient_OI` and gives autograd none."""
        self.gradient_sums = [GradientSum(rows) for rows in gradient_OI.split(self.out_features)]

    def refresh_float8(self) -> None:
        """Make the weight in 8 bits that of the weight; the first call makes all later products 8-bit ones."""
        if self.float8 is None:
            self.float8 = Float8.of(self.weight.detach())
        else:
            self.float8.refresh(self.weight.detach())

    def forward(self, x: Tensor, *, first: int = 0) -> Tensor:
        """[..., I] → [..., ΣO] of the projections from number `first` on."""
        skipped = sum(self.out_features[:first])
        outputs = (skipped, self.out_features[first:], self.gradient_sums[first:])
        if self.float8 is None or not torch.is_grad_enabled():  # evaluation is in bf16, as the exported drafter runs
            output = _Product.apply(x, self.weight, *outputs)
        else:
            output = _Float8Product.apply(x, self.weight, self.float8, *outputs)
        return output if self.bias is None else output + self.bias[skipped:]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_OI, skipped, out_features, gradient_sums):  # type: ignore[override]
        ctx.save_for_backward(x, weight_OI)
        ctx.skipped, ctx.out_features, ctx.gradient_sums = skipped, out_features, gradient_sums
        return functional.linear(x, weight_OI[skipped:])

    @staticmethod
    def backward(ctx, d_output):  # type: ignore[override]
        x, weight_OI = ctx.saved_tensors
        x_MI, d_output_MO = x.flatten(0, -2), d_output.flatten(0, -2)
        dx = (d_output_MO @ weight_OI[ctx.skipped :]).view_as(x) if ctx.needs_input_grad[0] else None
        if not ctx.gradient_sums:
            d_weight_OI = torch.zeros_like(weight_OI)
            torch.mm(d_output_MO.t(), x_MI, out=d_weight_OI[ctx.skipped :])
            return dx, d_weight_OI, None, None, None
        for gradient_sum, part_MO in zip(ctx.gradient_sums, d_output_MO.split(ctx.out_features, dim=1), strict=True):
            gradient_sum.add_product(part_MO, x_MI)
        return dx, None, None, None, None


class _Float8Product(torch.autograd.Function):
    """All three products in 8 bits. The weight is only named, so that autograd comes by; gradients need their sums."""

    @staticmethod
    def forward(ctx, x, weight_OI, float8, skipped, out_features, gradient_sums):  # type: ignore[override]
        x_float8 = Float8.of(x.flatten(0, -2))
        ctx.save_for_backward(*x_float8.columns)
        ctx.float8, ctx.skipped, ctx.out_features, ctx.gradient_sums = float8, skipped, out_features, gradient_sums
        output_MO = multiply(x_float8.rows, float8.rows.part(skipped), is_fast=True)
        return output_MO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, d_output):  # type: ignore[override]
        x_IM = Scaled(*ctx.saved_tensors)
        d_output_float8 = Float8.of(d_output.flatten(0, -2))
        first = 0
        for gradient_sum, size in zip(ctx.gradient_sums, ctx.out_features, strict=True):
            gradient_sum.add_float8_product(d_output_float8.columns.part(first, first + size), x_IM)
            first += size
        dx = None
        if ctx.needs_input_grad[0]:
            weight_IO = ctx.float8.columns.without_columns_before(ctx.skipped)
            dx = multiply(d_output_float8.rows, weight_IO, is_fast=False).view(*d_output.shape[:-1], -1)
        return dx, None, None, None, None, None
