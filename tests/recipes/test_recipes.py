# SPDX-License-Identifier: Apache-2.0
"""The recipes: each is complete, can be sent to a process, and learns; and the scores they are judged by."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from orchestra import metrics, recipes
from orchestra.data.fetch import available
from orchestra.data.sets import find
from orchestra.errors import ConfigError
from orchestra.recipes import models
from orchestra.recipes.recipe import Recipe

PARAMETERS = {
    "digits": 17_226,
    "regression": 5_897,
    "mnist-lenet": 61_706,
    "fashion-lenet": 61_706,
    "char-gpt": 244_240,
}
FETCHED = {"mnist-lenet": "mnist", "fashion-lenet": "fashion-mnist"}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def a_few(recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Some test samples; for a set that is not on this machine, noise of its shape."""
    if recipe.name in FETCHED and not available(find(FETCHED[recipe.name])):
        return torch.randn(16, 1, 28, 28), torch.arange(16) % 10
    inputs, targets = recipe.evaluation_data()
    return inputs[:16], targets[:16]


def train(recipe: Recipe, *, epochs: float, seed: int = 0) -> nn.Module:
    """Train in plain PyTorch, in one process: what a recipe must do before any strategy has a say."""
    torch.manual_seed(seed)
    model, (inputs, targets) = recipe.model(), recipe.data()
    optimizer = recipe.optimizer(model.parameters())
    steps = len(inputs) // recipe.batch
    for step in range(int(epochs * steps)):
        if step % steps == 0:
            order = torch.randperm(len(inputs))[: steps * recipe.batch].view(steps, recipe.batch)
        chosen = order[step % steps]
        optimizer.zero_grad()
        torch.autograd.backward(recipe.loss(model(inputs[chosen]), targets[chosen]))  # type: ignore[misc]
        optimizer.step()
    return model


def test_every_recipe_has_its_name() -> None:
    assert set(recipes.names()) == set(PARAMETERS)
    assert all(recipes.get(name).name == name for name in recipes.names())


def test_a_misspelt_recipe_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'char-gpt'"):
        recipes.get("chargpt")


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_can_be_sent_to_a_process(name: str) -> None:
    sent = pickle.loads(pickle.dumps(recipes.get(name)))  # as multiprocessing would; it never leaves this line
    assert sent.name == name
    assert sum(parameter.numel() for parameter in sent.model().parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_is_complete_and_takes_a_step(name: str) -> None:
    recipe = recipes.get(name)
    model, few = recipe.model(), a_few(recipe)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,} parameters" in recipe.about
    score, _, least = recipe.target.partition("=")
    scores = recipe.evaluate(model, few)
    assert score in scores
    assert scores[score] < float(least) < 1  # more is better, and an untrained model is not there yet
    optimizer = recipe.optimizer(model.parameters())
    before = recipe.loss(model(few[0]), few[1])  # type: ignore[misc]
    for _ in range(30):
        optimizer.zero_grad()
        torch.autograd.backward(recipe.loss(model(few[0]), few[1]))  # type: ignore[misc]
        optimizer.step()
    assert recipe.loss(model(few[0]), few[1]) < before  # type: ignore[misc]


@pytest.mark.parametrize("name", recipes.names())
def test_many_replicas_can_be_evaluated_in_one(name: str) -> None:
    recipe = recipes.get(name)
    replicas, (inputs, targets) = [recipe.model() for _ in range(2)], a_few(recipe)
    stacked, _ = torch.func.stack_module_state(replicas)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return recipe.loss(torch.func.functional_call(replicas[0], parameters, (x,)), y)  # type: ignore[misc]

    pairs = tuple(part.view(2, 8, *part.shape[1:]) for part in (inputs, targets))
    gradients = torch.func.vmap(torch.func.grad(loss))(stacked, *pairs)
    for rank, replica in enumerate(replicas):
        torch.autograd.backward(recipe.loss(replica(pairs[0][rank]), pairs[1][rank]))  # type: ignore[misc]
        for parameter, value in replica.named_parameters():
            torch.testing.assert_close(gradients[parameter][rank], value.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "epochs"), [("digits", 20), ("regression", 6)])
def test_plain_training_reaches_the_target(name: str, epochs: float) -> None:
    recipe = recipes.get(name)
    score, _, least = recipe.target.partition("=")
    model = train(recipe, epochs=epochs)
    assert recipe.evaluate(model, recipe.evaluation_data())[score] >= float(least)


def test_char_gpt_learns_and_looks_only_back() -> None:
    recipe = recipes.get("char-gpt")
    assert recipe.schedule is not None
    assert 0 < recipe.schedule(0) < recipe.schedule(0.05) < recipe.schedule(1) == 1
    model = train(recipe, epochs=0.06)  # 60 steps
    inputs, targets = recipe.evaluation_data()
    assert recipe.evaluate(model, (inputs[:100], targets[:100]))["loss"] < 2.9  # the letters' frequencies alone: 3.3
    changed = inputs[:1].clone()
    changed[0, 40:] = 0
    torch.testing.assert_close(model(changed)[:, :40], model(inputs[:1])[:, :40])


def test_accuracy_counts() -> None:
    scores = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    found = metrics.accuracy(nn.Identity(), (scores, torch.tensor([0, 1, 1])))
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(scores, torch.tensor([0, 1, 1])).item())


def test_next_character_counts_characters() -> None:
    scores = torch.zeros(2, 3, 4)
    scores[..., 1] = 5.0
    found = metrics.next_character(nn.Identity(), (scores, torch.tensor([[1, 1, 0], [1, 2, 3]])))
    assert found["accuracy"] == pytest.approx(0.5)


def test_regression_scores_of_the_perfect_and_of_the_mean() -> None:
    targets = torch.randn(50, 3)
    perfect = metrics.regression_scores(nn.Identity(), (targets, targets))
    assert perfect == {"mae": 0, "mse": 0, "r2": 1, "r2_min": 1}
    mean = metrics.regression_scores(nn.Identity(), (targets.mean(0).expand(50, 3), targets))
    assert mean["r2"] == pytest.approx(0, abs=1e-5)


def test_scores_do_not_depend_on_batches_and_leave_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(models.mlp(64, 16, 10), nn.Dropout(0.5))
    model[0].eval()  # a frozen part stays frozen
    few = a_few(recipes.get("digits"))
    whole = metrics.accuracy(model, few)
    monkeypatch.setattr(metrics, "BATCH", 5)
    assert metrics.accuracy(model, few) == pytest.approx(whole)
    assert metrics.accuracy(model, TensorDataset(*few)) == pytest.approx(whole)
    assert model.training
    assert model[1].training
    assert not model[0].training
    assert all(parameter.grad is None for parameter in model.parameters())
