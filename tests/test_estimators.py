"""Estimates of the KL: values, gradients, extremes, and the blockwise exact KL."""

import math
from decimal import Decimal, localcontext

import pytest
import torch

from kl_comedy.theory import estimators
from kl_comedy.theory.estimators import (
    ESTIMATORS,
    exact_kl,
    forward_estimate,
    forward_limit,
    k1,
    k2,
    k3,
    log_ratio,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WIDE = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def k3_truth(d):
    "exp(d) - 1 - d with 80 digits, for every number of d."
    with localcontext(prec=80):
        return torch.tensor(
            [float(Decimal(x).exp() - 1 - Decimal(x)) for x in d.tolist()], dtype=torch.float64
        )


def plain_kl(logits, ref_logits):
    logp, ref_logp = (x.double().log_softmax(-1) for x in (logits, ref_logits))
    return (logp.exp() * (logp - ref_logp)).sum(-1)


# ---- one-sample estimates


@pytest.mark.parametrize("k", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 3), (2, 0, 3), (2, 3, 4)])
def test_elementwise_in_every_dtype_and_shape(k, dtype, shape):
    logp, ref_logp = -randn(*shape, dtype=dtype).abs(), -randn(*shape, dtype=dtype, seed=1).abs()
    logp.requires_grad_()
    y = k(logp, ref_logp)
    assert y.shape == shape and y.dtype == WIDE[dtype]
    y.sum().backward()
    assert logp.grad.dtype == dtype
    d = ref_logp.double() - logp.detach().double()
    if k not in (k1, k2, k3):
        return  # the formulas that are written down here
    truth = {k1: -d, k2: d**2 / 2, k3: d.exp() - 1 - d}[k]
    torch.testing.assert_close(y.detach().double(), truth, rtol=1e-5, atol=1e-6)
    slope = {k1: torch.ones_like(d), k2: -d, k3: 1 - d.exp()}[k]
    torch.testing.assert_close(logp.grad.double(), slope, rtol=1e-2, atol=1e-3)


def test_non_contiguous_and_mixed_dtypes():
    logp, ref_logp = randn(4, 6).T, randn(6, 8, seed=1)[:, ::2]
    for k in ESTIMATORS.values():
        assert torch.equal(k(logp, ref_logp), k(logp.contiguous(), ref_logp.contiguous()))
    assert log_ratio(logp.float(), ref_logp).dtype == torch.float64
    assert log_ratio(logp.bfloat16(), ref_logp.half()).dtype == torch.float32


def test_sign_and_direction():
    "What the policy likes more than the reference has K1 > 0 and its slope pushes it down."
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    ref_logp = torch.tensor([-2.0, -2.0])
    assert log_ratio(logp, ref_logp).tolist() == [-1, 1]
    assert k1(logp, ref_logp).tolist() == [1, -1]
    for k in (k2, k3):
        (grad,) = torch.autograd.grad(k(logp, ref_logp).sum(), logp)
        assert grad[0] > 0 > grad[1]


def test_half_precision_is_promoted_before_the_subtraction():
    logp, ref_logp = torch.tensor([-100.0, -0.01]), torch.tensor([-0.01, -100.0])
    for dtype in (torch.bfloat16, torch.float16):
        a, b = logp.to(dtype), ref_logp.to(dtype)
        assert torch.equal(log_ratio(a, b), b.float() - a.float())


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_k3_keeps_its_relative_accuracy(dtype, tolerance):
    size = torch.logspace(-16, math.log10(40), 500, dtype=torch.float64)
    edges = torch.tensor([0.25, math.nextafter(0.25, 0), math.nextafter(0.25, 1), 40])
    d = torch.cat([size, -size, edges, -edges]).to(dtype)
    y, truth = k3(torch.zeros_like(d), d).double(), k3_truth(d)
    assert ((y - truth).abs() <= tolerance * truth).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_slope_keeps_its_relative_accuracy(dtype):
    size = torch.logspace(-12, math.log10(40), 500, dtype=torch.float64)
    d = torch.cat([size, -size]).to(dtype).requires_grad_()
    (slope,) = torch.autograd.grad(k3(torch.zeros_like(d), d).sum(), d)
    truth = torch.expm1(d.detach().double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    assert ((slope.double() - truth).abs() <= tolerance * truth.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_k2_and_k3_are_never_negative(dtype):
    info = torch.finfo(dtype)
    tiny = torch.tensor([info.smallest_normal, 5e-324, 1e-45, 1e-40, info.eps]).to(dtype)
    size = torch.cat(
        [tiny, torch.logspace(-45, 4.8, 2000).to(dtype), randn(5000, dtype=dtype).abs() * 1e-3]
    )
    for d in (size, -size):
        logp = randn(len(d), dtype=dtype, seed=2)
        for k in (k2, k3):
            assert (k(torch.zeros_like(d), d) >= 0).all()
            assert (k(logp, logp + d) >= 0).all()
    assert k3(logp, logp).abs().max() == 0


@pytest.mark.parametrize("k", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_value_and_gradient_are_finite_for_every_finite_input(k, direction, dtype):
    largest = torch.finfo(dtype).max
    size = [
        0,
        5e-324,
        1e-45,
        1e-30,
        1e-10,
        1e-3,
        0.25,
        1,
        2.62,
        11,
        44.3,
        44.5,
        88,
        89,
        100,
        354,
        356,
        709,
        710,
        1e3,
        1e6,
        9e18,
        1e19,
        1e30,
        largest / 2,
        largest,
    ]
    x = torch.tensor([s * v for v in size for s in (1, -1)], dtype=torch.float64).to(dtype)
    logp, ref_logp = (x.clone() for x in torch.meshgrid(x, x, indexing="ij"))
    logp.requires_grad_(), ref_logp.requires_grad_()
    reverse = direction == "reverse"
    y = k(logp, ref_logp) if reverse else forward_estimate(k, logp, ref_logp)
    assert y.isfinite().all()
    for grad in torch.autograd.grad(y.sum(), (logp, ref_logp)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_not_silenced_and_has_no_jump_at_its_seams(dtype):
    top = math.log(torch.finfo(dtype).max) / 2
    seam = torch.tensor([top], dtype=dtype)
    below, above = (torch.nextafter(seam, seam + s) for s in (-1, 1))
    far = torch.tensor([1, 2.7, 12, 40, 1e4, 1e15], dtype=dtype)
    d = torch.cat([below, seam, above, far]).requires_grad_()
    y = k3(torch.zeros_like(d), d)
    (slope,) = torch.autograd.grad(y.sum(), d)
    step = math.exp(top)
    assert (y[:3] / step - 1).abs().max() < 1e-3
    assert (slope[:3] / step - 1).abs().max() < 1e-4
    assert (slope[3:] / torch.expm1(far.clamp(max=top)) - 1).abs().max() < 1e-4
    for edge in (0.25, -0.25):
        seam = torch.tensor([edge], dtype=dtype)
        d = torch.cat([torch.nextafter(seam, seam - 1), seam, torch.nextafter(seam, seam + 1)])
        d.requires_grad_()
        y = k3(torch.zeros_like(d), d)
        (slope,) = torch.autograd.grad(y.sum(), d)
        eps = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(y.detach(), y[1].detach().expand(3), rtol=4 * eps, atol=0)
        torch.testing.assert_close(slope, torch.expm1(d.detach()), rtol=4 * eps, atol=0)


def apart(*sizes):
    "Log-probs whose log-ratios are these numbers, in float64, with gradients."
    d = torch.tensor(sizes, dtype=torch.float64)
    logp = -randn(len(d)).abs()
    return logp.requires_grad_(), (logp.detach() + d).requires_grad_()


@pytest.mark.parametrize("k", ESTIMATORS.values(), ids=ESTIMATORS)
def test_gradcheck(k):
    "Away from zero, where an estimate may have a kink; then those that are smooth there, too."
    sizes = [1e-3, -1e-3, 0.2499, 0.2501, -0.2499, -0.2501, 1, -1, 5, -20]
    assert torch.autograd.gradcheck(k, apart(*sizes))
    if k in (k1, k2, k3):
        assert torch.autograd.gradcheck(k, apart(0, 1e-8, -1e-8, *sizes))


# ---- the forward direction


@pytest.mark.parametrize("k", ESTIMATORS.values(), ids=ESTIMATORS)
def test_a_forward_estimate_is_the_ratio_times_the_swapped_estimate(k):
    logp, ref_logp = randn(200).requires_grad_(), randn(200, seed=1)
    want = (ref_logp - logp).exp() * k(ref_logp, logp)
    found = forward_estimate(k, logp, ref_logp)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)
    grads = [torch.autograd.grad(y.sum(), logp)[0] for y in (found, want)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)
    half = forward_estimate(k, logp.detach().bfloat16(), ref_logp.bfloat16())
    assert half.dtype == torch.float32 and half.shape == (200,)


@pytest.mark.parametrize("k", [k1, k2, k3])
def test_forward_gradcheck(k):
    def estimate(logp, ref_logp):
        return forward_estimate(k, logp, ref_logp)

    pair = apart(0, 1e-8, -1e-8, 1e-3, -1e-3, 0.2499, 0.2501, 1, -1, 5, -20)
    assert torch.autograd.gradcheck(estimate, pair)


@pytest.mark.parametrize("tokens", [2, 7, 1000])
@pytest.mark.parametrize("distance", [1e-6, 0.1, 3.0])
def test_forward_k1_and_k3_are_unbiased(tokens, distance):
    logits = randn(tokens)
    logp = logits.log_softmax(-1)
    ref_logp = (logits + distance * randn(tokens, seed=1)).log_softmax(-1)
    for k in (k1, k3):
        estimate = (logp.exp() * forward_estimate(k, logp, ref_logp)).sum()
        torch.testing.assert_close(estimate, exact_kl(ref_logp, logp), atol=1e-14, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [k1, k2, k3])
def test_a_forward_estimate_is_not_silenced_and_has_no_jump_at_its_seams(k, dtype):
    limit = forward_limit(dtype)
    sizes = [limit * (1 - 1e-6), limit, limit * (1 + 1e-6), 2 * limit, 1e15]
    d = torch.tensor(sizes, dtype=dtype, requires_grad=True)
    y = forward_estimate(k, torch.zeros_like(d), d)
    (slope,) = torch.autograd.grad(y.sum(), d)
    assert (y[:3] / y[1] - 1).abs().max() < 1e-3
    assert (slope / slope[1] - 1).abs().max() < 1e-3
    x = torch.tensor(limit, dtype=torch.float64)
    factor = {k1: 1 + x, k2: x + x**2 / 2, k3: x}[k]  # of e^x, by the product rule
    assert slope[1].double() / (x.exp() * factor) == pytest.approx(1, rel=1e-4)
    end = {k1: 0, k2: 0, k3: 1}[k]
    far = forward_estimate(k, torch.zeros(4, dtype=dtype), torch.tensor(sizes[1:]).to(dtype).neg())
    assert (far - end).abs().max() < 1e-12


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_forward_estimates_without_gradients(context):
    with context():
        logp, ref_logp = randn(5), randn(5, seed=1)
        y = forward_estimate(k3, logp, ref_logp)
    assert not y.requires_grad
    d = ref_logp - logp
    torch.testing.assert_close(y, d.exp() * d - d.exp() + 1)


# ---- unbiased and biased values


@pytest.mark.parametrize("tokens", [1, 2, 7, 1000])
@pytest.mark.parametrize("distance", [1e-6, 0.1, 3.0])
def test_k1_and_k3_are_unbiased(tokens, distance):
    logits = randn(tokens)
    logp = logits.log_softmax(-1)
    ref_logp = (logits + distance * randn(tokens, seed=1)).log_softmax(-1)
    exact = exact_kl(logp, ref_logp)
    for k in (k1, k3):
        torch.testing.assert_close(
            (logp.exp() * k(logp, ref_logp)).sum(), exact, atol=1e-14, rtol=1e-9
        )


def test_k2_is_biased_to_third_order():
    logits, direction = randn(50), randn(50, seed=1)
    logp = logits.log_softmax(-1)
    centred = direction - (logp.exp() * direction).sum()
    third = (logp.exp() * centred**3).sum() / 6
    for distance in (1e-2, 1e-3):
        ref_logp = (logits + distance * direction).log_softmax(-1)
        bias = (logp.exp() * (k2(logp, ref_logp) - k3(logp, ref_logp))).sum()
        assert abs(bias / (-(distance**3) * third) - 1) < 10 * distance


@pytest.mark.parametrize("k", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize(
    "logp, ref_logp, error, words",
    [
        (torch.zeros(2), torch.zeros(3), ValueError, "ref_logp has shape (3,)"),
        (torch.zeros(2, 1), torch.zeros(2), ValueError, "shape of logp, (2, 1)"),
        (torch.zeros(2).long(), torch.zeros(2), TypeError, "logp has dtype torch.int64"),
        (torch.zeros(2), torch.zeros(2).bool(), TypeError, "ref_logp has dtype torch.bool"),
    ],
)
def test_bad_input_is_named(k, logp, ref_logp, error, words):
    with pytest.raises(error) as caught:
        k(logp, ref_logp)
    assert words in str(caught.value)


# ---- the exact token KL

SHAPES = [(1,), (5,), (1, 5), (7, 1), (3, 5), (2, 3, 5), (2, 1, 3, 4), (0, 5), (2, 0, 5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [1, 10, 2**20])
def test_exact_kl_in_every_dtype_shape_and_block(monkeypatch, dtype, shape, block):
    monkeypatch.setattr(estimators, "BLOCK", block)
    logits, ref_logits = 2 * randn(*shape, dtype=dtype), 2 * randn(*shape, dtype=dtype, seed=1)
    pairs = [x.requires_grad_() for x in (logits, ref_logits)]
    y = exact_kl(*pairs)
    assert y.shape == shape[:-1] and y.dtype == WIDE[dtype]
    truth = plain_kl(*pairs)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(y.double(), truth, rtol=tolerance, atol=tolerance)
    weights = randn(*shape[:-1], seed=2)
    grads = torch.autograd.grad((y * weights).sum(), pairs)
    wanted = torch.autograd.grad((truth * weights).sum(), pairs)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)
    for x, grad, want in zip(pairs, grads, wanted, strict=True):
        assert grad.dtype == dtype and grad.shape == x.shape
        torch.testing.assert_close(grad, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:, :-1],
        lambda x: x[..., ::2],
        lambda x: x.transpose(0, 1),
        lambda x: x[1:, 2],
        lambda x: x.transpose(-1, -2),
        lambda x: x[:1].expand(3, -1, -1),
        lambda x: x[0, 0, ::3],
    ],
    ids=["slice", "stride", "transpose", "row", "swap", "expand", "vector"],
)
def test_exact_kl_of_views(monkeypatch, cut):
    monkeypatch.setattr(estimators, "BLOCK", 16)
    logits, ref_logits = (randn(4, 5, 6, seed=s).requires_grad_() for s in (0, 1))
    truth = plain_kl(cut(logits), cut(ref_logits))
    wanted = torch.autograd.grad(truth.square().sum(), (logits, ref_logits))
    for other in (cut(ref_logits), cut(ref_logits).contiguous()):
        y = exact_kl(cut(logits), other)
        torch.testing.assert_close(y, truth, rtol=1e-13, atol=1e-13)
        grads = torch.autograd.grad(y.square().sum(), (logits, ref_logits))
        torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-13)


def test_exact_kl_gradcheck_and_single_gradients():
    logits, ref_logits = randn(2, 3, 4), randn(2, 3, 4, seed=1)
    for needs in ((True, True), (True, False), (False, True)):
        pair = logits.clone().requires_grad_(needs[0]), ref_logits.clone().requires_grad_(needs[1])
        assert torch.autograd.gradcheck(exact_kl, pair)
    pair = [x.clone().requires_grad_() for x in (logits, ref_logits)]
    y = exact_kl(*pair).square().sum()
    (first,) = torch.autograd.grad(y, pair[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_exact_kl_without_gradients(context):
    logits, ref_logits = randn(3, 4).requires_grad_(), randn(3, 4, seed=1)
    with context():
        y = exact_kl(logits, ref_logits)
    assert not y.requires_grad
    torch.testing.assert_close(y.clone(), plain_kl(logits, ref_logits).detach())


def test_exact_kl_of_equal_and_of_shifted_logits():
    logits = randn(5, 11, dtype=torch.float32)
    assert exact_kl(logits, logits).abs().max() == 0
    assert exact_kl(logits, logits + 3).abs().max() < 1e-6
    assert exact_kl(logits, logits.double()).dtype == torch.float64


def test_exact_kl_keeps_one_number_a_position_for_the_backward_pass():
    saved = {}

    def pack(x):
        saved[x.data_ptr()] = x.numel()
        return x

    logits, ref_logits = randn(6, 1000).requires_grad_(), randn(6, 1000, seed=1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        exact_kl(logits, ref_logits)
    for x in (logits, ref_logits):
        del saved[x.data_ptr()]
    assert sum(saved.values()) == 6


@pytest.mark.parametrize("value", [1e4, 1e30, torch.finfo(torch.float32).max])
def test_exact_kl_is_finite_for_large_logits(value):
    logits = torch.tensor([[value, 0, 0], [0, -value, 0], [0, 0, value]], requires_grad=True)
    ref_logits = torch.tensor([[-value, 0, 0], [0, 0, 0], [0, value, 0]], requires_grad=True)
    y = exact_kl(logits, ref_logits)
    assert y.isfinite().all() and (y >= 0).all()
    for grad in torch.autograd.grad(y.sum(), (logits, ref_logits)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("vocabulary", [3, 1000, 50_000])
@pytest.mark.parametrize("gap", [1.0, 3e-2, 1e-3])
def test_exact_kl_near_the_reference_is_right_to_its_own_size(vocabulary, gap):
    """The plain formula is off by its own size at 1e-3 nats a token: the normalisers' rounding."""
    noise = randn(20, vocabulary, dtype=torch.float32, seed=1)
    logits = 3 * randn(20, vocabulary, dtype=torch.float32)
    ref_logits = logits + gap * noise
    grads = []
    for formula, dtype in ((exact_kl, torch.float32), (plain_kl, torch.float64)):
        x = logits.to(dtype).requires_grad_()
        y = formula(x, ref_logits.to(dtype))
        grads.append(torch.autograd.grad(y.sum(), x)[0].double())
        y = y.detach()
        if dtype == torch.float32:
            found = y.double()
    assert ((found - y).abs().sum() / y.sum()) < 1e-7 + 1e-7 / gap
    assert (found >= 0).all()
    assert (grads[0] - grads[1]).norm() < (1e-6 + 1e-7 / gap) * grads[1].norm()


@pytest.mark.parametrize("depth", [50, 70, 85, 95, 110, 1e10, 1e30])
def test_exact_kl_where_the_policy_gives_a_token_less_than_the_smallest_number(depth):
    logits = torch.tensor([[0.0, -depth, 0.0]], requires_grad=True)
    y = exact_kl(logits, torch.zeros(1, 3))
    assert y.item() == pytest.approx(math.log(1.5), abs=1e-6)
    (grad,) = torch.autograd.grad(y.sum(), logits)
    assert grad.abs().max() < 1e-6  # the policy is what it can be


@pytest.mark.parametrize("shift", [1e2, 1e6, 1e30])
def test_a_shift_of_all_logits_costs_no_digits(shift):
    logits, ref_logits = torch.tensor([[shift] * 3]), torch.tensor([[1.5, -2.0, 0.25]])
    for pair in ((logits, ref_logits), (ref_logits, logits)):
        plain = plain_kl(*(x.double() for x in pair))
        torch.testing.assert_close(exact_kl(*pair).double(), plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which, name", [(0, "logits"), (1, "ref_logits")])
@pytest.mark.parametrize("shape, index", [((4,), (2,)), ((3, 4), (1, 2)), ((2, 3, 4), (1, 0, 3))])
def test_exact_kl_names_a_logit_that_is_not_finite(bad, which, name, shape, index):
    pair = [torch.zeros(shape), torch.zeros(shape)]
    pair[which][index] = bad
    with pytest.raises(ValueError) as caught:
        exact_kl(*pair)
    assert str(caught.value).startswith(
        f"{name} is {bad} at position {index[:-1]}, token {index[-1]}:"
    )


@pytest.mark.parametrize(
    "logits, ref_logits, error, words",
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), ValueError, "logits (2, 3) and ref_logits (2, 4)"),
        (torch.zeros(2, 3), torch.zeros(3), ValueError, "one shape (..., V)"),
        (torch.zeros(()), torch.zeros(()), ValueError, "one shape (..., V)"),
        (torch.zeros(2, 0), torch.zeros(2, 0), ValueError, "V >= 1"),
        (torch.zeros(2, 3).long(), torch.zeros(2, 3), TypeError, "logits has dtype torch.int64"),
        (torch.zeros(2, 3), torch.zeros(2, 3).int(), TypeError, "ref_logits has dtype torch.int32"),
        (torch.tensor([3e38, -3e38]), torch.zeros(2), ValueError, "lie further apart than"),
    ],
)
def test_exact_kl_refuses_what_it_cannot_do(logits, ref_logits, error, words):
    with pytest.raises(error) as caught:
        exact_kl(logits, ref_logits)
    assert words in str(caught.value)
