# SPDX-License-Identifier: Apache-2.0
"""Any module as two flat vectors: what is strange about it stays, and its gradient is torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestra.core.gradient_mask import GradientMask
from orchestra.model.replica import Replica, flatten, problems_of, trainable, vector_dtype

BATCH = (torch.linspace(-1, 1, 40).view(8, 5), torch.linspace(0, 1, 8).view(8, 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.second(torch.tanh(self.first(x))))
        return y


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(5, 4).requires_grad_(False)
        self.free = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.free(self.kept(x))
        return y


class Scalar(nn.Module):
    """A parameter without dimensions, one never used, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.nothing = nn.Parameter(torch.ones(0, 2))
        self.linear = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scale * self.linear(x)
        return y


class Sweeping(nn.Module):
    """Drops all gradients in the middle of its own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad(set_to_none=True)
        y: Tensor = self.linear(x)
        return y


class Replacing(Sweeping):
    """Puts gradients of its own making in place of those it was given."""

    def forward(self, x: Tensor) -> Tensor:
        for p in self.parameters():
            p.grad = torch.zeros_like(p)
        y: Tensor = self.linear(x)
        return y


class Twisted(nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Picky(nn.Module):
    """Uses one half or the other, by the sign of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.plus = nn.Linear(5, 1)
        self.minus = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.plus(x) if float(x.sum()) > 0 else self.minus(x)
        return y


class Sums(nn.Module):
    """Whose gradients are all equal."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.one = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.some.sum() + self.one.sum()


class Meddling(Sweeping):
    """Runs a backward pass of its own and drops what it leaves."""

    def forward(self, x: Tensor) -> Tensor:
        torch.autograd.backward(self.linear(x).sum())
        return super().forward(x)


ZOO: list[Callable[[], nn.Module]] = [Tied, Frozen, Scalar, Sweeping, Replacing, Meddling, Twisted, Picky]


@pytest.fixture(params=[False, True], ids=["late", "early"])
def early(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of large parameters are taken as they come; here, of all."""
    if request.param:
        monkeypatch.setattr("orchestra.model.replica.LARGE", 1)


def replica_of(module: nn.Module, *, accumulate: int = 1, bf16: bool = False) -> Replica:
    x = flatten(module)
    return Replica(module, x, torch.full_like(x, 7.0), loss=F.mse_loss, accumulate=accumulate, bf16=bf16)


def torch_gradient(module: nn.Module, *batch: Tensor) -> tuple[Tensor, float]:
    module.zero_grad()
    loss = F.mse_loss(module(*batch[:-1]), batch[-1])
    torch.autograd.backward(loss)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(module).values()]
    return torch.cat([g.reshape(-1) for g in grads]), float(loss.detach())


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("make", ZOO)
def test_gradient_is_that_of_torch(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    expected, loss = torch_gradient(copy.deepcopy(module), *BATCH)
    replica = replica_of(module)
    assert replica.gradient(BATCH, 8) == pytest.approx(loss)
    torch.testing.assert_close(replica.g, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("make", ZOO)
def test_parameters_and_gradients_are_views(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    replica = replica_of(module)
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
    replica.gradient(BATCH, 8)
    replica.x.zero_()
    for p in trainable(module).values():
        assert not p.detach().any()
        if p.grad is None:  # those that were not used
            assert isinstance(module, Scalar | Picky)
            continue
        assert p.grad.numel() == 0 or p.grad.untyped_storage().data_ptr() == replica.g.untyped_storage().data_ptr()


@pytest.mark.usefixtures("early")
def test_an_unused_parameter_is_marked_in_that_step_only() -> None:
    torch.manual_seed(0)
    module = Picky()
    replica = replica_of(module)
    half = len(replica.g) // 2
    marks = GradientMask([slice(0, 5), slice(5, 6), slice(6, 11), slice(11, 12)], replica.g.device)
    replica.gradient((torch.ones(8, 5), BATCH[1]), 8)
    assert replica.g[:half].abs().sum() > 0
    assert not replica.g[half:].any()
    assert marks.absent(replica.g) == [slice(6, 11), slice(11, 12)]
    assert module.plus.weight.grad is not None
    assert module.minus.weight.grad is None
    replica.gradient((-torch.ones(8, 5), BATCH[1]), 8)
    assert not replica.g[:half].any()
    assert replica.g[half:].abs().sum() > 0
    assert marks.absent(replica.g) == [slice(0, 5), slice(5, 6)]


@pytest.mark.usefixtures("early")
def test_a_gradient_of_negative_zeros_is_there() -> None:
    """Also in a range that is a part of a parameter."""
    module = Sums()
    x = flatten(module)
    replica = Replica(module, x, torch.zeros_like(x), loss=lambda y, target: -0.0 * y, cuts=[0, 3])
    replica.gradient(BATCH, 8)
    assert torch.signbit(replica.g).tolist() == [False, True, True, False, True, False]
    assert GradientMask([slice(0, 3), slice(3, 5), slice(5, 6)], x.device).absent(replica.g) == []


def test_tied_weights_stand_once() -> None:
    assert len(flatten(Tied())) == 25 + 5 + 5 + 5 + 1


def test_frozen_parameters_are_not_in_x() -> None:
    module = Frozen()
    replica = replica_of(module)
    kept = module.kept.weight.clone()
    replica.gradient(BATCH, 8)
    assert len(replica.x) == 5
    assert torch.equal(module.kept.weight, kept)


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16, torch.float16])
def test_several_dtypes_have_one_master_copy(other: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 4)
            self.b = nn.Linear(4, 1).to(other)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x).to(other))
            return y.float()

    torch.manual_seed(0)
    module = Mixed()
    expected, _ = torch_gradient(copy.deepcopy(module), *BATCH)
    replica = replica_of(module)
    assert replica.x.dtype == vector_dtype(module) == torch.promote_types(torch.float32, other)
    replica.gradient(BATCH, 8)
    torch.testing.assert_close(replica.g, expected.to(replica.g.dtype), rtol=0, atol=0)
    # A step too small for the narrow copy still moves the master, and adds up.
    replica.x.fill_(1.0)
    for _ in range(64):
        replica.x.add_(2.0**-12)
    replica.refresh()
    assert float(module.b.weight.detach().float().mean()) == pytest.approx(1 + 64 * 2.0**-12, rel=1e-2)
    assert float(module.a.weight.detach().float().mean()) == pytest.approx(1 + 64 * 2.0**-12, rel=1e-6)


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("make", [Tied, Picky, Sweeping], ids=lambda c: c.__name__)
@pytest.mark.usefixtures("early")
def test_accumulation_is_the_whole_batch(make: Callable[[], nn.Module], parts: int) -> None:
    torch.manual_seed(0)
    module = make()
    whole = replica_of(copy.deepcopy(module))
    cut = replica_of(module, accumulate=parts)
    batch = (BATCH[0].abs(), BATCH[1])
    loss = whole.gradient(batch, 8)
    assert cut.gradient(batch, 8) == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(cut.g, whole.g, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("make", ZOO)
def test_what_is_told_to_be_final_is(make: Callable[[], nn.Module], parts: int) -> None:
    torch.manual_seed(0)
    replica = replica_of(make(), accumulate=parts)
    told: dict[int, tuple[slice, Tensor]] = {}

    def ready(part: slice) -> None:
        assert part.start not in told
        told[part.start] = part, replica.g[part].clone()

    for _ in range(2):
        told.clear()
        replica.gradient(BATCH, 8, ready)
        assert told
        for part, then in told.values():
            torch.testing.assert_close(replica.g[part], then, rtol=0, atol=0, equal_nan=True)
    told.clear()
    replica.gradient(BATCH, 8)
    assert not told


def test_the_last_layer_is_final_first() -> None:
    replica, told = replica_of(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))), []
    replica.gradient(BATCH, 8, lambda part: told.append(part.start))
    assert sorted(told) == [0, 20, 24, 28]
    assert {*told[:2]} == {24, 28}


def test_bf16_computes_in_bf16_and_keeps_float32() -> None:
    seen: list[torch.dtype] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            seen.append(y.dtype)
            return y

    replica = replica_of(Spy(), bf16=True)
    replica.gradient(BATCH, 8)
    assert seen == [torch.bfloat16]
    assert replica.g.dtype == torch.float32


def test_a_sparse_gradient_is_refused_by_name() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(torch.zeros(8, dtype=torch.long), self.table, sparse=True)

    with pytest.raises(TypeError, match="table is sparse"):
        replica_of(Hidden()).gradient(BATCH, 8)


def test_what_cannot_be_trained_is_named() -> None:
    def complaints(module: nn.Module) -> str:
        return "\n".join(str(p) for p in problems_of(module))

    assert "model.1.sparse" in complaints(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)))
    assert "model.0.weight = 'lazy'" in complaints(nn.Sequential(nn.LazyLinear(3)))
    assert "has no trainable parameter" in complaints(nn.Sequential(nn.ReLU()))
    assert "has no trainable parameter" in complaints(nn.Linear(2, 2).requires_grad_(False))
    complex_one = nn.Linear(2, 2)
    complex_one.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    assert "model.weight = 'torch.complex64'" in complaints(complex_one)
    assert complaints(nn.Linear(2, 2)) == ""
    only_empty = nn.Module()
    only_empty.register_parameter("p", nn.Parameter(torch.empty(0)))
    assert complaints(only_empty) != ""
