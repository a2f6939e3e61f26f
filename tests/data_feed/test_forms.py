# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays and dicts are samples like tensors: the same model to the last bit, in every world."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.processes import together
from tests.zoo import CLASSES, INPUTS, assert_same, classifier, make_classes, make_data, make_model, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from orchestra import Attached, ConfigError, Dirichlet, LabelSorted, Local, Simulated, Steps
from orchestra.data.feed import IndexedFeed, SampleStore
from orchestra.data.partitions import Partition
from orchestra.data.samples import is_columns, read
from orchestra.engine.cluster import Cluster
from orchestra.engine.fingerprint import parts_of_data
from orchestra.metrics import accuracy
from orchestra.user_loop.loader import Loader

Form = Callable[[], Any]


def arrays() -> tuple[Any, ...]:
    return tuple(t.numpy() for t in make_classes())


def frozen() -> tuple[Any, ...]:
    for array in (found := arrays()):
        array.setflags(write=False)
    return found


def by_name() -> dict[str, Tensor]:
    x, y = make_classes()
    return {"input": x, "labels": y}


def arrays_by_name() -> dict[str, Any]:
    """The target comes first: its name counts, not its place."""
    x, y = arrays()
    return {"label": y, "input": x}


def last_by_name() -> dict[str, Any]:
    """No name is one of a target: the last entry is."""
    x, y = make_classes()
    return {"input": x, "species": y}


class Rows(Dataset[dict[str, Any]]):
    """Items are dicts, as those of Hugging Face's datasets: lists and numbers."""

    def __init__(self) -> None:
        x, y = make_classes()
        self.x, self.y = x.tolist(), y.tolist()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"labels": self.y[index], "input": self.x[index]}


class RowsOfArrays(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": np.array(self.x[index], np.float32), "labels": np.int64(self.y[index])}


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = Rows()
        return (rows[i] for i in range(len(rows)))


class TupleStream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*make_classes(), strict=True)


FORMS: dict[str, Form] = {
    form.__name__: form for form in (arrays, frozen, by_name, arrays_by_name, last_by_name, Rows, RowsOfArrays)
}
GIVEN: dict[str, Any] = {"model": classifier, "loss": F.cross_entropy, "budget": Steps(20)}  # more than an epoch


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The given NumPy array is not writable")
        yield


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=2)"])
def test_in_virtual_time_every_form_gives_the_same_model(strategy: str, form: str, tmp_path: Path) -> None:
    there = {"cluster": Simulated(workers=2), **GIVEN}
    plain = train(strategy, tmp_path / "plain", data=make_classes, **there)
    other = train(strategy, tmp_path / "other", data=FORMS[form], **there)
    assert_same(plain.model, other.model)
    assert plain.summary.sent_total == other.summary.sent_total


@pytest.mark.parametrize("form", ["frozen", "arrays_by_name", "Rows"])
def test_in_processes_every_form_gives_the_same_model(form: str, tmp_path: Path) -> None:
    plain = train("allreduce", tmp_path / "plain", data=make_classes, cluster=Simulated(workers=2), **GIVEN)
    other = train("allreduce", tmp_path / "other", data=FORMS[form], cluster=Local(workers=2), **GIVEN)
    assert_same(plain.model, other.model)


@pytest.mark.parametrize("form", ["frozen", "arrays_by_name", "Rows"])
def test_over_sockets_every_form_gives_the_same_model(form: str, tmp_path: Path) -> None:
    plain = train("allreduce", tmp_path / "plain", data=make_classes, cluster=Simulated(workers=2), **GIVEN)

    def call() -> Any:
        there = {"cluster": Attached(patience=60), **GIVEN}
        return train("allreduce", tmp_path / "there", data=FORMS[form], **there).model.state_dict()

    for outcome in together(2, call):
        assert not outcome.kind, outcome.error
        assert all(torch.equal(outcome.value[name], t) for name, t in plain.model.state_dict().items())


def test_a_stream_of_dicts_gives_the_model_of_a_stream_of_tuples(tmp_path: Path) -> None:
    there = {"cluster": Simulated(workers=2), **GIVEN}
    plain = train("allreduce", tmp_path / "plain", data=TupleStream, **there)
    assert_same(plain.model, train("allreduce", tmp_path / "other", data=Stream, **there).model)


@pytest.mark.parametrize("form", ["frozen", "arrays_by_name", "Rows"])
@pytest.mark.parametrize("more", [{"accumulate": 3}, {"precision": "bf16"}], ids=["accumulate", "bf16"])
def test_batches_in_parts_and_mixed_precision(more: dict[str, Any], form: str, tmp_path: Path) -> None:
    there = {"cluster": Simulated(workers=2), **GIVEN, **more}
    plain = train("allreduce", tmp_path / "plain", data=make_classes, **there)
    assert_same(plain.model, train("allreduce", tmp_path / "other", data=FORMS[form], **there).model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("partition", [LabelSorted(), Dirichlet(alpha=0.3)], ids=["sorted", "dirichlet"])
def test_every_form_is_dealt_out_by_its_labels(partition: Partition, form: str) -> None:
    def of(data: Any) -> list[list[int]]:
        given: dict[str, Any] = {"batch": 4, "seed": 1, "size": 3, "partition": partition}
        return [IndexedFeed(read(data), rank=rank, **given).indices(0, 0) for rank in range(3)]

    assert of(FORMS[form]()) == of(make_classes())


@pytest.mark.parametrize("form", ["arrays", "by_name", "Rows"])
def test_samples_set_apart_come_in_every_form(form: str, tmp_path: Path) -> None:
    strategy = 'switch(first=allreduce, then=localsgd(tau=2), when=plateau(loss="validation"))'
    there = {"cluster": Simulated(workers=2), "data": make_classes, **GIVEN}
    plain = train(strategy, tmp_path / "plain", validation_data=make_classes, **there)
    assert_same(plain.model, train(strategy, tmp_path / "other", validation_data=FORMS[form], **there).model)


@pytest.mark.parametrize("form", ["frozen", "arrays_by_name", "Rows"])
def test_gradients_taken_together_are_those_taken_alone(form: str, tmp_path: Path) -> None:
    found = []
    for numerics in ("real", "batched"):
        cluster = Simulated(workers=3, numerics=numerics)
        found.append(train("allreduce", tmp_path / numerics, data=FORMS[form], cluster=cluster, **GIVEN).model)
    for a, b in zip(*(model.parameters() for model in found), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_works_with_numerics_off(form: str, tmp_path: Path) -> None:
    cluster = Simulated(workers=2, numerics="off")
    assert train("allreduce", tmp_path / "run", data=FORMS[form], cluster=cluster, **GIVEN).summary.steps == 20


# The model computes the loss.


class Own(nn.Module):
    """As models of Hugging Face: the loss is part of the output where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(input)
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


class Silent(Own):
    def forward(self, input: Tensor, labels: Tensor | None = None) -> Any:
        return self.inner(input)


class OwnDict(Own):
    def forward(self, input: Tensor, labels: Tensor | None = None) -> Any:
        return vars(super().forward(input, labels))


def of_logits(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


@pytest.mark.parametrize("cluster", [Local(workers=2), Simulated(workers=2)], ids=["local", "simulated"])
@pytest.mark.parametrize("model", [Own, OwnDict])
def test_the_loss_of_the_model_itself(model: type[nn.Module], cluster: Cluster, tmp_path: Path) -> None:
    plain = train("allreduce", tmp_path / "plain", data=make_classes, cluster=Simulated(workers=2), **GIVEN)
    given = {**GIVEN, "cluster": cluster, "model": model, "loss": None}
    own = train("allreduce", tmp_path / "own", data=by_name, **given).model
    for a, b in zip(plain.model.parameters(), own.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_loss_of_the_model_itself_over_sockets(tmp_path: Path) -> None:
    plain = train("allreduce", tmp_path / "plain", data=make_classes, cluster=Simulated(workers=2), **GIVEN)

    def call() -> Any:
        given = {**GIVEN, "cluster": Attached(patience=60), "model": Own, "loss": None}
        return [*train("allreduce", tmp_path / "there", data=by_name, **given).model.parameters()]

    for outcome in together(2, call):
        assert not outcome.kind, outcome.error
        assert all(map(torch.equal, plain.model.parameters(), outcome.value))


def test_a_loss_of_the_output_of_such_a_model_and_a_tuple_for_one(tmp_path: Path) -> None:
    there = {**GIVEN, "cluster": Simulated(workers=2), "model": Own}
    one = train("allreduce", tmp_path / "1", data=by_name, **{**there, "loss": None}).model
    two = train("allreduce", tmp_path / "2", data=by_name, **{**there, "loss": of_logits}).model
    three = train("allreduce", tmp_path / "3", data=make_classes, **{**there, "loss": None}).model
    assert_same(one, two)
    assert_same(one, three)


# What is refused, and how.


class OfTexts(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": "to be or not", **super().__getitem__(index)}


def column(**more: Any) -> Form:
    return lambda: {**by_name(), **more}


REFUSED: dict[str, tuple[Any, str]] = {
    "empty dict": (dict, "data = {}    is empty"),
    "unequal lengths": (
        lambda: {"input": make_classes()[0], "labels": make_classes()[1][:90]},
        "data = {'input': 101, 'labels': 90}    the tensors must have the same number of samples",
    ),
    "unequal arrays": (lambda: (np.zeros((5, 7)), np.zeros(4)), "data = [5, 4]    the tensors must have the same"),
    "objects": (lambda: (np.array([None] * 101), arrays()[1]), "data[0] = 'dtype object'    has no tensor of its kind"),
    "texts": (column(words=np.array(["a"] * 101)), "data['words'] = 'dtype <U1'    has no tensor of its kind"),
    "dates": (column(when=np.zeros(101, "datetime64[s]")), "data['when'] = 'dtype datetime64[s]'    has no tensor"),
    "lists": (column(more=[1] * 101), "data['more'] = 'list'    must be a tensor or a NumPy array"),
    "a dict of splits": (lambda: {"train": Rows(), "test": Rows()}, "data['train'] = 'Rows'    must be a tensor"),
    "masked": (column(gaps=np.ma.zeros(101)), "data['gaps'] = 'masked array'    has no tensor of its kind: fill"),
    "numbers as names": (lambda: dict(enumerate(make_classes())), "data[0] = 0    must have a text for its name"),
    "one array": (lambda: arrays()[0], "data = 1    a sample must have at least an input and a target; for an auto"),
    "one entry": (lambda: {"input": make_classes()[0]}, "data = 1    a sample must have at least an input and a"),
    "nan": (column(input=np.full((101, 7), np.nan, np.float32)), "data['input'][0] = 'nan or inf'"),
    "no argument": (
        lambda: {"x": make_classes()[0], "labels": make_classes()[1]},
        "data['x'] = 'x'    is no argument of Sequential.forward(input)",
    ),
    "column of texts": (OfTexts, "data['text'] = 'text'    is no argument of Sequential.forward(input)"),
    "float64": (
        lambda: (arrays()[0].astype("float64"), arrays()[1]),
        "data[0] = 'float64'    the model's parameters are float32: convert the data",
    ),
    "float64 by name": (column(input=arrays()[0].astype("float64")), "data['input'] = 'float64'    the model's param"),
    "classes as floats": (
        lambda: (arrays()[0], arrays()[1].astype("float64")),
        "data[-1] = 'float64'    class numbers must be int64",
    ),
    "int32 classes": (
        lambda: (arrays()[0], arrays()[1].astype("int32")),
        "data[-1] = 'int32'    class numbers must be int64",
    ),
}


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("cluster", [Local(workers=2), Simulated(workers=2)], ids=["local", "simulated"])
@pytest.mark.parametrize("form", REFUSED)
def test_what_is_wrong_with_data_is_named(form: str, cluster: Cluster, tmp_path: Path) -> None:
    data, said = REFUSED[form]
    with pytest.raises(ConfigError) as caught:
        train("allreduce", tmp_path / "run", data=data, cluster=cluster, **GIVEN)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("data", "model", "said"),
    [
        (make_classes, classifier, "Sequential.forward(input) does not take 2 arguments"),
        (by_name, classifier, "Sequential.forward(input) does not take 'labels'"),
        (make_classes, Silent, "but gave a Tensor"),
        (by_name, Silent, "but gave a Tensor"),
    ],
)
def test_a_loss_that_nothing_computes_must_be_given(data: Form, model: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss = None    must be given, such as F\.cross_entropy") as caught:
        train("allreduce", tmp_path / "run", model=model, data=data, loss=None)
    assert said in str(caught.value)


def test_a_target_of_regression_may_be_whole_numbers(tmp_path: Path) -> None:
    data = (make_data()[0], torch.arange(101).view(-1, 1) - 50)
    given: dict[str, Any] = {"loss": lambda output, target: F.mse_loss(output, target.float()), "model": make_model}
    train("allreduce", tmp_path / "run", data=lambda: data, cluster=Simulated(workers=2), budget=Steps(1), **given)


# Arrays.


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"])
def test_an_array_becomes_a_tensor_of_its_dtype_in_its_memory(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(3, 2)
    (tensor,) = read(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tensor.data_ptr() == array.ctypes.data


def test_arrays_that_torch_does_not_take_as_they_are() -> None:
    array = np.arange(6.0, dtype="float32").reshape(3, 2)
    for odd in (array[::-1], array[:, ::-1], array.astype(">f4"), array.T):
        (tensor,) = read((odd,))
        assert tensor.tolist() == odd.tolist()
        assert tensor.dtype is torch.float32


def test_a_file_mapped_for_reading_is_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    (tensor,) = read((mapped,))
    assert tensor.data_ptr() == mapped.ctypes.data
    assert SampleStore((tensor,)).take([4, 1])[0].tolist() == [4.0, 1.0]


def test_what_is_no_column_stays_as_it_is() -> None:
    rows = Rows()
    assert read(rows) is rows
    assert not is_columns(rows)
    assert is_columns(read({"x": np.zeros(3)}))


# What others see of the samples.


def test_samples_are_compared_by_name() -> None:
    x, y = make_classes()
    tuples, named = parts_of_data((x, y)), parts_of_data({"input": x, "labels": y})
    assert named["sample 0"].startswith(f"input {INPUTS} float32, labels a number int64, in sum ")
    assert tuples["sample 0"].rpartition(" ")[2] == named["sample 0"].rpartition(" ")[2]
    assert parts_of_data({"input": x, "species": y}) != named
    assert parts_of_data(Rows())["sample 0"].startswith("labels a number int64, input ")


def test_the_sum_of_the_samples_is_written_down(tmp_path: Path) -> None:
    sums = set()
    for name, form in (("plain", make_classes), ("arrays", arrays), ("dict", by_name)):
        run = train("allreduce", tmp_path / name, data=form, cluster=Simulated(workers=2), **GIVEN).run
        sums.add(json.loads((run / "config.json").read_text())["samples"])
    assert len(sums) == 1
    assert None not in sums


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_taken_of_every_form(form: str) -> None:
    torch.manual_seed(0)
    model = classifier()
    assert accuracy(model, FORMS[form]()) == accuracy(model, make_classes())
    own = Own()
    own.inner = model
    assert accuracy(own, by_name()) == accuracy(model, make_classes())


def test_a_loop_shares_out_dicts_and_counts_arrays() -> None:
    shares = [Loader(DataLoader(Rows(), batch_size=5), seed=0, rank=rank, size=2) for rank in range(2)]
    seen: list[int] = []
    for share in shares:
        share.fetched = seen.append
    labels = [batch["labels"] for share in shares for batch in share]
    assert sum(seen) == sum(map(len, labels)) == len(Rows())
    assert torch.cat(labels).bincount().tolist() == make_classes()[1].bincount(minlength=CLASSES).tolist()
    alone = Loader(
        DataLoader(Rows(), batch_size=101, collate_fn=lambda rows: np.zeros((101, 3))), seed=0, rank=0, size=1
    )
    alone.fetched = seen.append
    assert len([*alone]) == 1
    assert seen[-1] == 101
