"""`assemble` against its formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import OPCHECKS, Setting, agree, both_layouts, close
from torch import Tensor

from dyrep.kernels import Part, assemble

Pair = tuple[int, int]
SIZES = [(1, 1), (3, 3), (2, 2), (4, 3), (1, 5), (5, 1), (6, 6), (7, 7)]


def formula(
    base: Tensor | None,
    parts: list[Part],
    scales: Tensor,
    size: Pair,
    identity: Pair | None = None,
) -> Tensor:
    like = parts[0].kernel if base is None else base
    shape = (*like.shape[:2], *size)
    total = torch.zeros(shape, dtype=torch.float64, device=like.device) if base is None else base.double()
    for part, scale in zip(parts, scales.double()[: len(parts)], strict=True):
        w = part.kernel.double()
        w = scale[:, None, None, None] * w
        if part.spread:
            total = total + w / (size[0] * size[1])
        else:
            large, (top, left) = torch.zeros_like(total), part.tap
            large[:, :, top : top + w.shape[2], left : left + w.shape[3]] = w
            total = total + large
    if identity is None:
        return total
    eye = torch.eye(shape[1], dtype=torch.float64, device=like.device).repeat(shape[0] // shape[1] + 1, 1)[: shape[0]]
    large = torch.zeros(shape, dtype=torch.float64, device=like.device)
    large[:, :, identity[0], identity[1]] = eye
    return total + scales.double()[-1, :, None, None, None] * large


def all_kinds(setting: Setting, channels: Pair, size: Pair, *, inner: bool = False) -> list[Part]:
    """A part of each kind: pointwise, an average, a row, a column, one of full size, and one off the centre."""
    top, left = centre = (size[0] // 2, size[1] // 2)
    kinds = [
        ((1, 1), centre, False),
        ((1, 1), (0, 0), True),
        ((1, size[1]), (top, 0), False),
        ((size[0], 1), (0, left), False),
        (size, (0, 0), False),
        ((size[0] - top, size[1] - left), centre, False),
    ]
    return [Part(setting.randn(*channels, *own, inner=inner), tap, spread) for own, tap, spread in kinds]


def check(
    setting: Setting,
    base: Tensor | None,
    parts: list[Part],
    size: Pair,
    identity: Pair | None = None,
    tolerance: float | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    outputs = (parts[0].kernel if base is None else base).shape[0]
    scales = setting.wide.randn(len(parts) + (identity is not None), outputs)
    kernel = assemble(base, parts, scales, size=size, identity=identity, dtype=dtype or setting.dtype)
    assert kernel.dtype == (dtype or setting.dtype)
    inputs = [part.kernel for part in parts] + [x for x in (scales, base) if x is not None and len(x)]
    return agree([kernel], [formula(base, parts, scales, size, identity)], inputs, tolerance or setting.tolerance)


@both_layouts
def test_kernel_and_all_gradients_are_those_of_the_formula(setting, inner):
    parts = all_kinds(setting, (6, 3), (3, 3), inner=inner)
    base = setting.randn(6, 3, 3, 3, inner=inner)
    check(setting, base, parts, (3, 3), (1, 1))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_any_size_can_be_assembled(single, size):
    tap = (size[0] - 1, size[1] // 2)
    check(single, single.randn(4, 2, *size), all_kinds(single, (4, 2), size), size, tap)


@both_layouts
@pytest.mark.parametrize("channels", [(1, 1), (2, 70), (17, 1), (6, 3)], ids=str)
def test_any_number_of_channels_and_groups_can_be_assembled(single, channels, inner):
    parts = all_kinds(single, channels, (3, 3), inner=inner)[:3]
    square = channels[0] % channels[1] == 0  # otherwise there is no identity
    check(single, single.randn(*channels, 3, 3, inner=inner), parts, (3, 3), (1, 1) if square else None)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_identity_is_that_of_a_convolution_with_groups(single, groups):
    nothing = Part(torch.zeros(4, 4 // groups, 1, 1, device=single.device))
    ones = torch.ones(2, 4, device=single.device)
    kernel = assemble(None, [nothing], ones, size=(3, 3), identity=(1, 1), dtype=single.dtype)
    x = single.randn(2, 4, 5, 5, grad=False)
    assert torch.equal(F.conv2d(x.double(), kernel.double(), padding=1, groups=groups), x.double())


def test_base_and_identity_can_be_left_out(single):
    parts = all_kinds(single, (4, 2), (3, 3))[:3]
    check(single, None, parts, (3, 3))
    check(single, None, parts, (3, 3), (1, 2))
    check(single, single.randn(4, 2, 3, 3), parts, (3, 3))


def test_there_can_be_many_parts(single):
    parts = [*all_kinds(single, (3, 2), (3, 3)), *all_kinds(single, (3, 2), (3, 3))]
    check(single, None, parts, (3, 3))


def test_without_parts_it_is_the_base_and_the_identity(single):
    base, scales = single.randn(3, 3, 3, 3, grad=False), single.randn(1, 3, grad=False)
    kernel = assemble(base, [], scales, size=(3, 3), identity=(1, 1), dtype=single.dtype)
    close(kernel, formula(base, [], scales, (3, 3), (1, 1)), 1e-6)


def test_without_parts_there_are_gradients(single):
    check(single, single.randn(3, 3, 3, 3), [], (3, 3), (1, 1))


def test_the_result_may_be_narrower_than_what_it_consists_of(single):
    parts = all_kinds(single, (6, 3), (3, 3))
    grads = check(single, single.randn(6, 3, 3, 3), parts, (3, 3), (1, 1), tolerance=2e-2, dtype=torch.bfloat16)
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_parts_may_differ_in_dtype(single):
    half = single._replace(dtype=torch.bfloat16)
    parts = [*all_kinds(half, (6, 3), (3, 3))[:2], *all_kinds(single, (6, 3), (3, 3))[2:]]
    check(single, half.randn(6, 3, 3, 3), parts, (3, 3), (1, 1), tolerance=2e-2)


@both_layouts
def test_the_result_lies_in_memory_as_the_base_does_or_the_first_part(single, inner):
    parts = all_kinds(single, (3, 3), (3, 3), inner=not inner)[:3]
    base, scales = single.randn(3, 3, 3, 3, inner=inner), torch.ones(3, 3, device=single.device)
    layout = torch.channels_last if inner else torch.contiguous_format
    assert assemble(base, parts, scales, size=(3, 3), dtype=single.dtype).is_contiguous(memory_format=layout)
    check(single, base, parts[1:], (3, 3))
    first = [Part(base), *parts[1:]]
    assert assemble(None, first, scales, size=(3, 3), dtype=single.dtype).is_contiguous(memory_format=layout)


def test_kernels_may_be_permuted_and_the_base_a_slice(single):
    parts = [Part(single.randn(3, 5, 3, 3).detach().transpose(0, 1).requires_grad_())]
    check(single, single.slice_of(single.randn(5, 3, 3, 3)), parts, (3, 3))


def test_the_gradient_may_lie_in_memory_as_it_likes(single):
    parts, scales = all_kinds(single, (3, 3), (3, 3), inner=True)[1:3], single.randn(2, 3)
    kernels = [part.kernel for part in parts]
    out, expected = assemble(None, parts, scales, size=(3, 3), dtype=single.dtype), formula(None, parts, scales, (3, 3))
    weights = single.randn(3, 3, 1, 1, grad=False).expand(3, 3, 3, 3)
    for along in (weights, single.slice_of(weights), weights.contiguous()):
        grads = torch.autograd.grad(out, [*kernels, scales], along, retain_graph=True)
        exact = torch.autograd.grad(expected, [*kernels, scales], along.double(), retain_graph=True)
        for grad, other in zip(grads, exact, strict=True):
            close(grad, other, 1e-5)


def test_two_calls_give_the_same_bits(single):
    parts, scales = all_kinds(single, (3, 3), (3, 3))[:4], single.randn(4, 3)
    results = []
    for _ in range(2):
        out = assemble(None, parts, scales, size=(3, 3), dtype=single.dtype)
        results.append([out, *torch.autograd.grad(out.square().sum(), [part.kernel for part in parts] + [scales])])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def test_gradients_go_only_where_they_are_wanted(single):
    fixed = Part(single.randn(5, 3, 1, 1, grad=False), (1, 1))
    trained = Part(single.randn(5, 3, 3, 3))
    scales = single.randn(2, 5, grad=False)
    assert not assemble(None, [fixed], scales[:1], size=(3, 3), dtype=single.dtype).requires_grad
    out = assemble(None, [fixed, trained], scales, size=(3, 3), dtype=single.dtype)
    agree([out], [formula(None, [fixed, trained], scales, (3, 3))], [trained.kernel], 1e-5)


@pytest.mark.parametrize("identity", [None, (1, 1)], ids=str)
def test_scales_may_be_views(single, identity):
    scales = single.slice_of(single.randn(2 + (identity is not None), 5))
    parts = all_kinds(single, (5, 5), (3, 3))[:2]
    out = assemble(None, parts, scales, size=(3, 3), identity=identity, dtype=single.dtype)
    agree([out], [formula(None, parts, scales, (3, 3), identity)], [part.kernel for part in parts] + [scales], 1e-5)


def test_kernels_may_overlap_or_have_gaps(single):
    # with gaps (a slice) the kernels write beyond the end of a gradient, so only what overlaps is tried
    kernel = single.randn(5, 1, 1, 1, grad=False).expand(5, 3, 1, 1).requires_grad_()
    check(single, None, [Part(kernel, (1, 1))], (3, 3))


def test_an_average_has_no_place(single):
    check(single, None, [Part(single.randn(5, 3, 1, 1), (1, 1), spread=True)], (3, 3))


@both_layouts
def test_many_input_channels_are_assembled_in_blocks(triton_only, monkeypatch, inner):
    from dyrep.kernels import assembling_triton

    monkeypatch.setattr(assembling_triton, "_TILE", 64)
    parts = all_kinds(triton_only, (9, 9), (3, 3), inner=inner)[:3]
    check(triton_only, triton_only.randn(9, 9, 3, 3, inner=inner), parts, (3, 3), (1, 1))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 1024, 3, 3), True),
        ((4, 1025, 3, 3), False),
        ((4, 64, 15, 15), True),
        ((4, 65, 15, 15), False),
        ((4, 16384, 1, 1), True),
        ((4, 16385, 1, 1), False),
    ],
    ids=str,
)
def test_an_output_channel_fits_one_program_up_to_a_size(triton_only, shape, expected):
    from dyrep.kernels import assembling_triton

    assert assembling_triton.fits(torch.empty(shape, device="meta")) == expected


def test_what_does_not_fit_gets_its_gradients_from_pytorch(triton_only, monkeypatch):
    from dyrep.kernels import assembling_triton

    monkeypatch.delattr(assembling_triton, "backward_")
    parts = all_kinds(triton_only, (2, 1030), (3, 3))[:3]
    check(triton_only, triton_only.randn(2, 1030, 3, 3), parts, (3, 3))


def test_double_precision_is_kept_where_kernels_would_not(triton_only):
    exact = triton_only._replace(dtype=torch.float64)
    check(exact, exact.randn(6, 3, 3, 3), all_kinds(exact, (6, 3), (3, 3)), (3, 3), (1, 1))


@both_layouts
@pytest.mark.parametrize("based", [False, True], ids=["no base", "base and identity"])
def test_the_operator_is_registered_as_pytorch_wants_it(inner, based):
    setting = Setting("cpu", torch.float32)
    kernels = [setting.randn(4, 2, 1, 1, inner=inner), setting.randn(4, 2, 3, 3, inner=inner)]
    base, identity = (setting.randn(4, 2, 3, 3, inner=inner), [1, 1]) if based else (None, [])
    places = [1, 1, 0, 0, 0, 0]
    arguments = (base, kernels, setting.randn(3 if based else 2, 4), places, identity, [3, 3], torch.bfloat16)
    torch.library.opcheck(torch.ops.dyrep.assemble.default, arguments, test_utils=OPCHECKS)


@pytest.mark.slow
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.integers(1, 3),
    inputs=st.integers(2, 6),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    inner=st.booleans(),
    tile=st.sampled_from([16, 128, 8192]),
    data=st.data(),
)
def test_sweep_of_kernels_and_places(triton_only, groups, inputs, size, inner, tile, data):
    from dyrep.kernels import assembling_triton

    channels = (groups * inputs, inputs)
    parts = all_kinds(triton_only, channels, size, inner=inner)[:2]
    for _ in range(2):
        own = tuple(data.draw(st.integers(1, n)) for n in size)
        tap = tuple(data.draw(st.integers(0, n - k)) for n, k in zip(size, own, strict=True))
        parts.append(Part(triton_only.randn(*channels, *own, inner=inner), tap))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembling_triton, "_TILE", tile)
        check(triton_only, triton_only.randn(*channels, *size, inner=inner), parts, size, (0, size[1] - 1), 1e-4)
