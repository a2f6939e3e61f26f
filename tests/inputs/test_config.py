# SPDX-License-Identifier: Apache-2.0
"""Bad configurations: all problems at once, each with its remedy, before any process starts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.zoo import classifier, make_classes, make_data, make_model, train
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import orchestra
from orchestra import (
    ASP,
    BSP,
    AllReduce,
    ConfigError,
    Dirichlet,
    Epochs,
    LabelSorted,
    Local,
    LocalSGD,
    ParameterServer,
    Samples,
    Seconds,
    Simulated,
    SlowMo,
    Solo,
    Steps,
    Target,
)
from orchestra.engine import expression
from orchestra.engine.expression import parse
from orchestra.strategies.catalogue import ABSENT, PARTS, ROWS, STRATEGIES

pytestmark = pytest.mark.usefixtures("no_process")


def problems(tmp_path: Path, strategy: Any = "allreduce", **given: Any) -> str:
    """What is said about a bad call."""
    out = given.pop("out", tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        train(strategy, out, **given)
    assert caught.value.exit_code == 2
    said = str(caught.value)
    count = len(caught.value.problems)
    assert said.splitlines()[0] == (f"{count} problems" if count != 1 else "1 problem")
    assert not (tmp_path / "run").exists()
    return said


def some_stream(count: int) -> IterableDataset[tuple[Tensor, Tensor]]:
    class Stream(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return zip(*make_data(count), strict=True)

    return Stream()


# Strategies as text.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alreduce", "did you mean 'allreduce'?"),
        ("slomo(tau=3)", "did you mean 'slowmo'?"),
        ("slowmo(tua=3)", "did you mean 'tau'?"),
        ("slowmo(3)", "slowmo(tau=...)"),
        ("slowmo(tau=0)", "must be at least 1"),
        ("slowmo(tau=-2)", "must be at least 1"),
        ("slowmo(tau=2.5)", "must be a whole number"),
        ("slowmo(tau=True)", "must be a whole number"),
        ("slowmo(tau='many')", "must be a whole number"),
        ("slowmo(beta=1.5)", "must be at most 0.999"),
        ("slowmo(beta=1e999)", "must be a finite number"),
        ("slowmo(buffers='rest')", "reset, maintain, average"),
        ("slowmo(base=bsp())", "must be a Strategy"),
        ("slowmo(base=localsgd(tau=0))", "strategy.base.tau = 0"),
        ("localsgd(tau=0, beta=3)", "is not an option"),
        ("localsgd(tau=1, tau=2)", "tau"),
        ("ps(consistency=allreduce())", "must be a Consistency"),
        ("ps(servers=0)", "must be at least 1"),
        ("ps(servers=99)", "is too many"),
        ("asp()", "is not a strategy but a consistency of parameter servers: ps(consistency=asp())"),
        ("bsp", "is not a strategy but a consistency of parameter servers: ps(consistency=bsp)"),
        ("3", "is not a strategy"),
        ("", "cannot be read"),
        ("localsgd(tau=eight)", "strategy localsgd.tau = 'eight'    must be a whole number, at least 1, such as tau=8"),
        ("LocalSGD(tau=Eight)", "strategy LocalSGD.tau = 'Eight'    must be a whole number"),
        ("localsgd(tau=eight())", "strategy localsgd.tau = 'eight()'    must be a whole number"),
        ("localsgd(tau=2*eight)", "strategy localsgd.tau = '2 * eight'    must be a whole number"),
        ("localsgd(tua=eight)", "did you mean 'tau'?"),
        ("slowmo(beta=high)", "strategy slowmo.beta = 'high'    must be a number, 0 to 0.999, such as beta=0.7"),
        ("slowmo(base=localsgd(tau=eight))", "strategy localsgd.tau = 'eight'    must be a whole number"),
        ("ps(servers=two)", "strategy ps.servers = 'two'    must be a whole number, at least 1"),
        ("ps(consistency=ssp(staleness=few))", "strategy ssp.staleness = 'few'    must be a whole number"),
        ("ps(consistency=asap)", "strategy ps.consistency = 'asap'    no strategy or part is called 'asap'; did"),
        ("slowmo(", "cannot be read"),
        ("slowmo(**{'tau': 3})", "** is not allowed"),
        ("__import__('os').system('true')", "strategy"),
        ("slowmo(tau=__import__('os').getpid())", "strategy"),
        ("slowmo(tau=[].append(1))", "strategy slowmo.tau = '[].append(1)'    must be a whole number"),
        ("ps(consistency=[].append(1))", "neither a number"),
        ("slowmo(tau={[]: 1})", "strategy"),
        ("a\0b", "cannot be read"),
        ("-" * 900 + "1", "strategy"),
        ("(" * 900, "cannot be read"),
        ("-" * 100_000 + "1", "has 100001 characters"),
        ("(" * 50_000_000, "has 50000000 characters"),
        ("slowmo(base=" * 5000 + "solo()" + ")" * 5000, "strategy"),
    ],
)
def test_a_bad_strategy_is_named(text: str, said: str, tmp_path: Path) -> None:
    assert said in problems(tmp_path, text)


def test_several_bad_options_are_named_together(tmp_path: Path) -> None:
    said = problems(tmp_path, "slowmo(tau=eight, beta=high)")
    assert "strategy slowmo.tau = 'eight'" in said
    assert "strategy slowmo.beta = 'high'" in said


NUMBERS = [
    (cls, field)
    for cls in (*STRATEGIES, *PARTS)
    for field in dataclasses.fields(cls)
    if get_type_hints(cls)[field.name] in (int, float, int | None, float | None)
]


@pytest.mark.parametrize(("cls", "field"), NUMBERS, ids=[f"{cls.__name__}.{field.name}" for cls, field in NUMBERS])
def test_every_number_of_a_strategy_is_named_with_what_it_must_be(cls: Any, field: Any) -> None:
    name = cls.__name__.lower()
    with pytest.raises(ConfigError) as caught:
        parse(f"{name}({field.name}=eight)")
    (problem,) = caught.value.problems
    assert problem.where == f"strategy {name}.{field.name}"
    assert problem.value == "eight"
    assert "number" in problem.message


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (expression.parse_optimizer, "sgd(lr=fast)", "optimizer sgd.lr = 'fast'    must be a number"),
        (expression.parse_optimizer, "adamw(betas=usual)", "optimizer adamw.betas = 'usual'    must be numbers"),
        (expression.parse_optimizer, "sgd(nesterov=yes)", "optimizer sgd.nesterov = 'yes'    must be True or False"),
        (expression.parse_schedule, "warmup(epochs=two)", "schedule warmup.epochs = 'two'    must be a number"),
    ],
)
def test_words_in_place_of_numbers_are_named_in_optimizers_and_schedules(read: Any, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert said in str(caught.value)


def test_other_names_of_a_strategy_are_understood(tmp_path: Path) -> None:
    assert parse("fedavg(tau=4)") == LocalSGD(tau=4)
    assert parse("DDP") == AllReduce()
    assert expression.show(parse("fedavg")) == "localsgd"
    run = train("fedavg(tau=4)", tmp_path / "run", cluster=Simulated(workers=2), budget=Steps(2)).run
    assert json.loads((run / "config.json").read_text())["strategy"] == "localsgd(tau=4)"


def test_no_other_name_is_that_of_a_strategy_or_part() -> None:
    names = [name for row in ROWS for name in row.names] + [cls.__name__.lower() for cls in PARTS] + [*ABSENT]
    assert len(names) == len(set(names))


def test_a_known_strategy_that_is_missing_here_is_named_with_the_nearest(tmp_path: Path) -> None:
    said = problems(tmp_path, "diloco(tau=500)")
    assert "DiLoCo is not available" in said
    assert "slowmo(tau=500" in said


@given(st.text(max_size=40) | st.text("solmpsaytu()=,[]{}'0123456789.-+* \\\n", max_size=60))
@settings(max_examples=400, deadline=None)
def test_whatever_is_written_there_is_a_strategy_or_a_problem(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(text), tuple(STRATEGIES))


def test_unknown_options_are_type_errors() -> None:
    with pytest.raises(TypeError):
        SlowMo(tua=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        orchestra.train(stratgy="allreduce")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Local(worker=3)  # type: ignore[call-arg]


# Values.

NAN, INF = float("nan"), float("inf")
BAD: list[tuple[dict[str, Any], str]] = [
    ({"strategy": 7}, "strategy = 7"),
    ({"strategy": AllReduce}, "must be a strategy such as AllReduce()"),
    ({"strategy": None}, "strategy"),
    ({"strategy": SlowMo(tau=0)}, "strategy.tau = 0"),
    ({"strategy": LocalSGD(tau="4")}, "must be a whole number"),  # type: ignore[arg-type]
    ({"strategy": SlowMo(beta=-0.1)}, "strategy.beta = -0.1"),
    ({"strategy": SlowMo(alpha=NAN)}, "must be a finite number"),
    ({"strategy": ParameterServer(servers=-1)}, "strategy.servers = -1"),
    ({"strategy": ParameterServer(consistency=5)}, "must be a Consistency"),  # type: ignore[arg-type]
    ({"strategy": SlowMo(base=ParameterServer())}, "base"),
    ({"strategy": SlowMo(base=ParameterServer(consistency=ASP()))}, "base"),
    ({"strategy": Solo()}, "Solo is one process"),
    ({"cluster": Local(workers=0)}, "cluster.workers = 0"),
    ({"cluster": Local(workers=-3)}, "cluster.workers = -3"),
    ({"cluster": Local(workers=10**9)}, "at most 512"),
    ({"cluster": Local(workers=2.0)}, "cluster.workers = 2.0"),  # type: ignore[arg-type]
    ({"cluster": Local(workers="4")}, "cluster.workers = '4'"),  # type: ignore[arg-type]
    ({"cluster": Local(device="gpu")}, 'must be "cpu", "cuda" or "auto"'),  # type: ignore[arg-type]
    ({"cluster": Local(threads=0)}, "cluster.threads = 0"),
    ({"cluster": Local(threads="2")}, "cluster.threads = '2'"),  # type: ignore[arg-type]
    ({"cluster": Local(patience=0)}, "cluster.patience = 0"),
    ({"cluster": Local(patience=NAN)}, "cluster.patience = nan"),
    ({"cluster": Local(patience="long")}, "cluster.patience = 'long'"),  # type: ignore[arg-type]
    ({"cluster": 4}, "cluster = 4"),
    ({"cluster": "local"}, "cluster = 'local'"),
    ({"batch": 0}, "batch = 0"),
    ({"batch": -1}, "batch = -1"),
    ({"batch": 2.5}, "batch = 2.5"),
    ({"batch": "32"}, "batch = '32'"),
    ({"batch": True}, "batch = True"),
    ({"batch": 10**30}, "batch = "),
    ({"batch": 50}, "at most 33"),
    ({"seed": -1}, "seed = -1"),
    ({"seed": 1.5}, "seed = 1.5"),
    ({"seed": 2**70}, "seed = "),
    ({"clip": 0}, "clip = 0"),
    ({"clip": -1.0}, "clip = -1.0"),
    ({"clip": NAN}, "clip = nan"),
    ({"clip": "1"}, "clip = '1'"),
    ({"clip": 1.0, "strategy": ParameterServer(servers=2)}, "each server sees only its range"),
    ({"accumulate": 0}, "accumulate = 0"),
    ({"accumulate": 7}, "at most 6"),
    ({"tolerate": 0}, "tolerate = 0"),
    ({"precision": "fp16"}, 'must be "float32" or "bf16"'),
    ({"budget": Steps(0)}, "budget.steps = 0"),
    ({"budget": Steps(-5)}, "budget.steps = -5"),
    ({"budget": Steps(2.5)}, "budget.steps = 2.5"),  # type: ignore[arg-type]
    ({"budget": Steps("9")}, "budget.steps = '9'"),  # type: ignore[arg-type]
    ({"budget": Epochs(NAN)}, "budget.epochs = nan"),
    ({"budget": Epochs(INF)}, "budget.epochs = inf"),
    ({"budget": Samples(0)}, "budget.samples = 0"),
    ({"budget": Seconds(-1)}, "budget.seconds = -1"),
    ({"budget": 5}, "must be Steps, Epochs"),
    ({"budget": Target("accuracy", 0.9)}, "may never be reached"),
    ({"budget": Target("accuracy", 0.9) | Epochs(1)}, "a target needs evaluate="),
    ({"evaluate_every": Steps(0), "evaluate": len, "evaluation_data": make_data}, "evaluate_every = 0"),
    ({"evaluate_every": 5}, "evaluate_every = 5"),
    ({"checkpoint_every": 5}, "checkpoint_every = 5"),
    ({"checkpoint_every": Steps(0)}, "checkpoint_every = 0"),
    ({"checkpoint_every": Steps(1.5)}, "checkpoint_every = 1.5"),  # type: ignore[arg-type]
    ({"checkpoint_every": Seconds(5)}, "checkpoint_every"),
    ({"evaluate": print}, "evaluation_data"),
    ({"evaluate": 3, "evaluation_data": make_data}, "evaluate"),
    ({"schedule": 0.5}, "schedule"),
    ({"schedule": lambda epochs: NAN}, "schedule"),
    ({"schedule": lambda epochs: -1.0}, "schedule"),
    ({"model": make_model()}, "give the function that makes it"),
    ({"model": 3}, "model"),
    ({"data": make_data()}, "data"),
    ({"loss": "mse"}, "loss"),
    ({"optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)}, "optimizer"),
    ({"optimizer": "sgd"}, "optimizer = 'sgd'"),
    ({"optimizer": partial(torch.optim.SGD, lr=-0.1)}, "optimizer"),
    ({"optimizer": partial(torch.optim.SGD, lr=0.0)}, "optimizer.lr = 0.0"),
    ({"optimizer": partial(torch.optim.SGD, lr=NAN)}, "optimizer.lr = nan"),
    ({"optimizer": partial(torch.optim.SGD, lr=INF)}, "optimizer.lr = inf"),
    ({"optimizer": partial(torch.optim.SGD, lr=1e9)}, "far too large"),
    ({"optimizer": partial(torch.optim.SGD, rate=0.1)}, "rate"),  # type: ignore[call-arg]
    ({"optimizer": lambda params: None}, "optimizer"),
    ({"partition": "iid", "data": make_classes, "model": classifier, "loss": F.cross_entropy}, "partition = 'iid'"),
    ({"partition": LabelSorted, "data": make_classes, "model": classifier, "loss": F.cross_entropy}, "partition"),
    ({"strategy": ParameterServer(servers="3"), "clip": 1.0}, "strategy.servers = '3'"),  # type: ignore[arg-type]
    ({"strategy": SlowMo(base=5)}, "strategy.base = 5"),  # type: ignore[arg-type]
    ({"partition": LabelSorted()}, "no class number"),
    ({"partition": Dirichlet(alpha=0.0), "data": make_classes, "model": classifier, "loss": F.cross_entropy}, "alpha"),
    ({"partition": Dirichlet(alpha=NAN), "data": make_classes, "model": classifier, "loss": F.cross_entropy}, "alpha"),
    ({"partition": LabelSorted(), "data": lambda: some_stream(100)}, "a stream does not have"),
    ({"resume": True}, "nothing can be resumed"),
    ({"progress": 3}, "progress"),
    ({"note": {"a": object()}}, "note"),
]


@pytest.mark.parametrize(("given_", "said"), BAD, ids=lambda v: v if isinstance(v, str) else None)
def test_a_bad_value_is_named(given_: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in problems(tmp_path, **given_)


class Halves:
    """A partition that looks at no labels."""

    def shards(self, labels: Tensor, size: int, seed: int) -> list[Tensor]:
        return list(torch.arange(len(labels)).tensor_split(size))


def test_a_partition_of_ones_own_needs_no_classes(tmp_path: Path) -> None:
    result = train("allreduce", tmp_path, cluster=Simulated(workers=2), partition=Halves(), budget=Steps(2))
    assert result.summary.samples > 0


def test_all_problems_at_once(tmp_path: Path) -> None:
    said = problems(
        tmp_path,
        "sloowmo",
        cluster=Local(workers=0, threads=-1),
        batch=0,
        seed=-1,
        clip=-1,
        precision="half",
        budget=Steps(0) | Epochs(-1),
        optimizer=3,
        checkpoint_every=Steps(0),
    )
    assert said.startswith("11 problems")
    for part in (
        "strategy", "cluster.workers", "cluster.threads", "batch", "seed", "clip", "precision", "budget.steps",
        "budget.epochs", "optimizer", "checkpoint_every",
    ):  # fmt: skip
        assert f"\n  {part} = " in said


def test_a_value_that_is_very_long_is_cut(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "x" * 1_000_000)) < 2000


# Folders.


def test_a_folder_that_is_used_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert "is not empty" in problems(tmp_path, out=tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file" in problems(tmp_path, out=tmp_path / "file")
    assert "out" in problems(tmp_path, out=tmp_path / "file" / "below")
    assert "out" in problems(tmp_path, out=5)


def test_a_metric_that_evaluate_does_not_give(tmp_path: Path) -> None:
    """Known before any process starts; and the folder can be used for the next try."""

    def accuracy(model: nn.Module, data: Any) -> float:
        return 0.5

    budget = Target("acuracy", 0.9) | Steps(3)
    given_: dict[str, Any] = {"evaluate": accuracy, "evaluation_data": make_data, "budget": budget}
    with pytest.raises(ConfigError, match="acuracy"):
        train("allreduce", tmp_path / "run", **given_)
    with pytest.raises(ConfigError, match="acuracy"):
        train("allreduce", tmp_path / "run", **given_)


# Data.


class Samples_(Dataset[Any]):
    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def with_nan() -> tuple[Tensor, Tensor]:
    x, y = make_data()
    x[17, 2] = NAN
    return x, y


def with_wrong_label(label: int) -> tuple[Tensor, Tensor]:
    x, y = make_classes()
    y[23] = label
    return x, y


pairs = [(torch.zeros(7), torch.zeros(1))] * 30
DATA: list[tuple[dict[str, Any], str]] = [
    ({"data": lambda: make_data(2), "batch": 1}, "fewer than the 3 workers"),
    ({"data": lambda: make_data(0)}, "there is no sample"),
    ({"data": lambda: (torch.zeros(9, 7), torch.zeros(8, 1))}, "same number of samples"),
    ({"data": with_nan}, "data[0][17]"),
    ({"data": lambda: 5}, "must give a tuple or a dict of tensors or NumPy arrays"),
    ({"data": lambda: None}, "must give a tuple or a dict of tensors or NumPy arrays"),
    ({"data": lambda: (torch.tensor(1.0), torch.tensor(2.0))}, "data"),
    ({"data": lambda: (torch.zeros(30, 7),)}, "at least an input and a target"),
    ({"data": lambda: Samples_(*[torch.zeros(7)] * 30)}, "data"),
    ({"data": lambda: Samples_()}, "there is no sample"),
    ({"data": lambda: some_stream(0)}, "stream"),
    ({"data": lambda: Samples_(*pairs), "partition": LabelSorted()}, "no class number"),
    (
        {"data": lambda: Samples_(*[(torch.zeros(7), torch.zeros(2))] * 30), "partition": LabelSorted()},
        "no class number",
    ),
    ({"data": partial(with_wrong_label, 3), "model": classifier, "loss": F.cross_entropy}, "data[-1][23] = 3"),
    ({"data": partial(with_wrong_label, -1), "model": classifier, "loss": F.cross_entropy}, "data[-1][23] = -1"),
    ({"data": partial(with_wrong_label, 9), "model": classifier, "loss": nn.CrossEntropyLoss()}, "outputs are 0 to 2"),
    ({"loss": lambda y, t: (y - t) ** 2}, "must give one number"),
    ({"loss": lambda y, t: 0.5}, "must give one number"),
    ({"loss": lambda y, t: torch.tensor(0.5)}, "does not depend on the trainable parameters"),
]


@pytest.mark.parametrize(("given_", "said"), DATA, ids=lambda v: v if isinstance(v, str) else None)
def test_bad_data_is_named(given_: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in problems(tmp_path, **given_)


def test_model_and_data_problems_come_together(tmp_path: Path) -> None:
    said = problems(tmp_path, data=with_nan, optimizer=partial(torch.optim.SGD, lr=NAN), model=lambda: nn.Linear(7, 1))
    assert "data[0][17]" in said
    assert "optimizer.lr" in said


def test_an_error_in_the_users_own_code_comes_through_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        train("allreduce", tmp_path / "run", model=lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train("allreduce", tmp_path / "run", model=lambda: nn.Linear(8, 1))


def test_consistencies_are_what_they_say() -> None:
    assert ParameterServer().consistency == BSP()
    assert ParameterServer(consistency=ASP()).consistency != BSP()
