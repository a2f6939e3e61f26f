# SPDX-License-Identifier: Apache-2.0
"""Everything the command line says without training."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Orchestra
from tests.processes import environ_of
from tests.zoo import train

from orchestra import LARS, AllReduce, Attached, Warmup
from orchestra.cli.options import Options, split_strategies
from orchestra.cli.train_arguments import read_partition
from orchestra.clusters.local import Local
from orchestra.data.partitions import Dirichlet, LabelSorted
from orchestra.engine import expression
from orchestra.errors import ConfigError
from orchestra.formatting import percents
from orchestra.live import follower
from orchestra.runs.budget import Epochs, Seconds, Target
from orchestra.strategies.catalogue import STRATEGIES

VERBS = ("demo", "run", "resume", "compare", "strategies", "explain", "doctor", "data", "lab", "launch")


def test_help_names_every_verb(orchestra: Orchestra) -> None:
    said = orchestra("--help")
    assert said.code == 0
    assert all(verb in said.out for verb in VERBS)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "data"])
def test_help_of_a_verb_shows_examples(verb: str, orchestra: Orchestra) -> None:
    said = orchestra(verb, "--help")
    assert said.code == 0
    assert "For example" in said.out
    assert said.out.count(f"orchestra {verb}") >= 2


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from orchestra.cli import invoke\n"
        "codes = [invoke(['run', '--help']), invoke(['--version']), invoke(['run', 'digit'])]\n"
        "found = 'torch' in sys.modules\n"
        "sys.exit(0 if (codes, found) == ([0, 0, 2], False) else f'exit codes {codes}, torch imported: {found}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_env(), check=False)
    assert done.returncode == 0, done.stderr


def _env() -> dict[str, str]:
    import os

    return dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}


@pytest.mark.parametrize(
    ("command", "said", "not_said"),
    [
        (
            "run --network 10mbit",
            ["orchestra sim --network", "--lab", "orchestra recommend, compare, sweep and sim"],
            ["trusted"],
        ),
        ("resume --network 10mbit", ["orchestra sim --network", "--lab"], ["trusted"]),
        ("run --sim", ["Use `orchestra sim`"], ["Did you mean"]),
        ("run --numerics off", ["use `orchestra sim`"], ["Did you mean"]),
        (
            "run --lab 10mbit,1ms",
            ["--lab is an option of orchestra compare.", "orchestra lab up"],
            ["--compute", "--lr"],
        ),
        ("sim --lab 10mbit,1ms", ["--lab is an option of orchestra compare."], ["--compute", "--lr"]),
        ("run --hosts FILE", ["orchestra launch --hosts FILE -- run"], ["--out", "--steps"]),
        ("run --strategies slowmo", ["Did you mean --strategy?", "orchestra recommend, compare and"], ["--trace"]),
        ("compare --strategy slowmo", ["Did you mean --strategies?", "orchestra run and sim"], ["--trace"]),
        ("run --worker 3", ["Did you mean --workers?"], ["--order"]),
        ("run --frobnicate", ["No such option: --frobnicate"], ["Did you mean", "is an option of"]),
    ],
)
def test_an_unknown_option_is_explained(
    command: str, said: list[str], not_said: list[str], orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    verb, *more = command.split()
    answer = orchestra(verb, "digits", *more)
    assert answer.code == 2
    (message,) = [line for line in answer.err.splitlines() if "No such option" in line]
    assert all(words in message for words in said), message
    assert not any(words in message for words in not_said), message


def test_strategies_lists_the_catalogue(orchestra: Orchestra) -> None:
    found = orchestra("strategies", "--json").json
    assert [entry["name"] for entry in found] == [cls.__name__.lower() for cls in STRATEGIES]
    assert {entry["name"]: entry["short"] for entry in found}["parameterserver"] == "ps"
    assert {entry["name"]: entry["synchronous"] for entry in found}["parameterserver"] == "with bsp"
    assert "1910.00643" in {entry["name"]: entry["paper"] for entry in found}["slowmo"]
    assert all(name in orchestra("strategies").out for name in ("slowmo", "Wang et al. 2020"))


@pytest.mark.parametrize("cls", STRATEGIES)
def test_every_example_of_every_strategy_can_be_read(cls: type, orchestra: Orchestra) -> None:
    found = orchestra("explain", cls.__name__.lower(), "--json").json
    assert found["examples"]
    assert all(isinstance(expression.parse(text), cls) for text in found["examples"])


def test_explain_shows_pseudo_code_and_options(orchestra: Orchestra) -> None:
    said = orchestra("explain", "slowmo")
    assert said.code == 0
    assert all(text in said.out for text in ("u  ← β u", "tau = 12", "at least 1", "Bytes sent", "slowmo(tau=24)"))
    assert "ps(consistency=asp())" in orchestra("explain", "asp").out


def test_explain_another_name_says_whose_it_is_and_how_they_differ(orchestra: Orchestra) -> None:
    said = orchestra("explain", "fedavg")
    assert said.code == 0
    assert said.out.startswith("fedavg is another name for localsgd. ")
    assert "epochs" in said.out.split("\n\n")[0]
    assert "localsgd(tau=" in said.out
    assert orchestra("explain", "ddp").out.startswith("ddp is another name for allreduce. ")
    record = orchestra("explain", "fedavg", "--json").json
    assert record["name"] == "localsgd"
    assert [*record["aliases"]] == ["fedavg"]


def test_other_names_are_listed(orchestra: Orchestra) -> None:
    found = {record["name"]: record for record in orchestra("strategies", "--json").json}
    assert [*found["allreduce"]["aliases"]] == ["ddp"]
    assert found["slowmo"]["aliases"] == {}
    assert "fedavg: localsgd" in orchestra("strategies").err


def test_explain_a_strategy_that_is_missing_here(orchestra: Orchestra) -> None:
    said = orchestra("explain", "diloco")
    assert said.code == 2
    assert "DiLoCo is not available" in said.err
    assert "slowmo(tau=500" in said.err


def test_explain_a_misspelt_name(orchestra: Orchestra) -> None:
    said = orchestra("explain", "slomo")
    assert said.code == 2
    assert "did you mean 'slowmo'?" in said.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("digits",), "Did you mean `orchestra run digits`?"),
        (("train.py",), "Did you mean `orchestra run train.py`?"),
        (("run", "digit"), "did you mean 'digits'?"),
        (("run", "nowhere.py"), "there is no such file"),
        (("run", "digits", "--strategy", "slomo"), "did you mean 'slowmo'?"),
        (("run", "digits", "--strategy", "slowmo(taw=3)"), "did you mean 'tau'?"),
        (("run", "digits", "--partition", "dirichlt"), "did you mean 'dirichlet'?"),
        (("run", "digits", "--optimizer", "larz"), "did you mean 'lars'?"),
        (("run", "digits", "--optimizer", "lars"), "missing 1 required positional argument: 'lr'"),
        (
            ("run", "digits", "--optimizer", "sgd(lrr=1)"),
            "optimizer sgd.lrr = 1    is not an option; did you mean 'lr'?",
        ),
        (("run", "digits", "--optimizer", "7"), "is not an optimizer; write it like lars("),
        (("run", "digits", "--optimizer", "lars(0.5)"), "arguments of lars need their names, e.g. lars(lr=...)"),
        (
            ("run", "digits", "--optimizer", "lars(lr=1)", "-s", "ps", "--servers", "2"),
            "a server of ParameterServer holds a range",
        ),
        (("run", "digits", "--schedule", "warmpu"), "did you mean 'warmup'?"),
        (("run", "digits", "--schedule", "warmup(epochs=-1)"), "schedule.epochs = -1    must be at least 0"),
        (("run", "digits", "--schedule", "warmup(how=fast)"), "must be one of gradual, constant"),
        (("compare", "digits", "--schedule", "warmup(then=lars)"), "no schedule is called 'lars'"),
        (("run", "digits", "--target", "accuracy"), "accuracy=0.95"),
        (("run", "digits", "--servers", "2", "--strategy", "slowmo"), "has no servers"),
        (("run", "digits", "--stratgy", "slowmo"), "--strategy"),
        (("run", "digits", "--checkpoint-every", "0"), "at least 1"),
        (("run", "digits", "--", "stray"), "a recipe takes none"),
        (("rnu",), "run"),
        (("compare", "digits", "--strategies", "allreduce,pss"), "did you mean 'ps'?"),
        (("compare", "digits", "--target", "acuracy=1"), "did you mean 'accuracy'?"),
        (("compare", "digits", "--seeds", "0"), "at least 1"),
        (("resume", "nowhere"), "there is no such folder"),
    ],
)
def test_bad_input_is_refused_with_a_hint(arguments: tuple[str, ...], hint: str, orchestra: Orchestra) -> None:
    said = orchestra(*arguments)
    assert said.code == 2
    assert hint in said.err
    assert "Traceback" not in said.err
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(("environ", "told"), [({}, True), ({"LOCAL_RANK": "1"}, False), ({"RANK": "x"}, True)])
def test_of_many_processes_on_a_machine_one_says_what_is_wrong(
    environ: dict[str, str], told: bool, orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the others end with the same code; but what is wrong with one of them alone, that one says."""
    place = environ_of(1, 2, 29500) | {"LOCAL_RANK": "0"} | environ
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    said = orchestra("run", "digits", "--batch", "-1")
    assert said.code == 2
    assert bool(said.err) is told


def test_a_script_ends_without_a_word_where_another_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for local_rank, is_told in (("0", True), ("1", False)):
        for name, value in (environ_of(1, 2, 29500) | {"LOCAL_RANK": local_rank}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as caught:
            train("allreduce", tmp_path / "run", batch=-1)
        sys.excepthook(ConfigError, caught.value, None)
        assert ("batch = -1" in capsys.readouterr().err) is is_told
    sys.excepthook(ValueError, ValueError("of another kind"), None)
    assert "of another kind" in capsys.readouterr().err


def test_all_problems_at_once(orchestra: Orchestra) -> None:
    said = orchestra("run", "digits", "--workers", "0", "--batch", "-1", "--device", "gpu", "--epochs", "-1")
    assert said.code == 2
    assert "4 problems" in said.err


def test_resume_of_a_run_that_was_not_begun_here(orchestra: Orchestra, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"note": {}}')
    assert "resume=True" in orchestra("resume", str(tmp_path)).err
    (tmp_path / "config.json").write_text('{"note": {"recipe": "digits", "options": {}}}')
    said = orchestra("resume", str(tmp_path))
    assert said.code == 7
    assert "no checkpoint" in said.err
    (tmp_path / "config.json").write_text('{"note": {"recipe": "digits", "options": {}}, "loop": true}')
    said = orchestra("resume", str(tmp_path))
    assert said.code == 2
    assert "a loop under orchestra.prepare, which saves its own state" in said.err


def test_a_run_goes_on_as_it_was_started(orchestra: Orchestra, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = {"workers": 2, "servers": 1, "note": {"recipe": "digits", "options": {}}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(begun | {"cluster": {"kind": "attached"}}))
    said = orchestra("resume", "run")
    assert said.code == 2
    assert "torchrun --standalone --nproc-per-node 3 -m orchestra resume run, orchestra launch" in said.err
    (tmp_path / "run" / "config.json").write_text(json.dumps(begun | {"cluster": {"kind": "local"}}))
    for name, value in environ_of(0, 2, 29500).items():
        monkeypatch.setenv(name, value)
    said = orchestra("resume", "run")
    assert said.code == 2
    assert "run `orchestra resume run` alone" in said.err


# What options change in a call of `train`.


def test_how_long_a_silent_machine_is_sought_is_said_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is for processes that torchrun" in Options(grace=0).read()[1][0].message
    for name, value in environ_of(0, 2, 29500).items():
        monkeypatch.setenv(name, value)
    cluster = Options(grace=0.0).changes()["cluster"]
    assert cluster(None).grace == 0
    assert cluster(Attached(grace=5, trusted=True)) == Attached(grace=0, trusted=True)
    assert Options(grace=-1).read()[1][0].where == "grace"


@pytest.mark.parametrize("verb", ["run", "resume"])
def test_help_tells_of_silent_machines(verb: str, orchestra: Orchestra) -> None:
    assert "--grace" in orchestra(verb, "--help").out


def test_options_change_only_what_they_name() -> None:
    changes = Options(workers=3, epochs=2).changes()
    assert set(changes) == {"cluster", "budget"}
    assert changes["cluster"](Local(workers=1, patience=7.0)) == Local(workers=3, patience=7.0)
    assert changes["budget"](Seconds(3) | Target("accuracy", 0.9)) == Epochs(2) | Target("accuracy", 0.9)


def test_a_target_alone_keeps_the_end() -> None:
    assert Options(target="mae=0.5").changes()["budget"](Epochs(2)) == Epochs(2) | Target("mae", 0.5)


def test_servers_change_the_strategy_there_was() -> None:
    assert Options(servers=2).changes()["strategy"]("ps(consistency=asp)").servers == 2
    with pytest.raises(ConfigError, match="has no servers"):
        Options(servers=2).changes()["strategy"]("allreduce")


def test_solo_has_one_worker() -> None:
    assert Options(strategy="solo").changes()["cluster"](Local(workers=4)).workers == 1


def test_an_optimizer_and_a_schedule_are_chosen() -> None:
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    changes = Options(optimizer="lars(lr=0.5, eta=0.02)", schedule="warmup(epochs=2, factor=8)").changes()
    made = changes["optimizer"](torch.optim.SGD)(params)
    assert isinstance(made, LARS)
    assert (made.defaults["lr"], made.defaults["eta"]) == (0.5, 0.02)
    assert changes["schedule"](None) == Warmup(epochs=2, factor=8)
    assert Options(optimizer="adamw", lr=0.3).changes()["optimizer"](None)(params).defaults["lr"] == 0.3
    kept = Options(lr=0.3).changes()["optimizer"](partial(torch.optim.SGD, momentum=0.5))(params)
    assert (kept.defaults["lr"], kept.defaults["momentum"]) == (0.3, 0.5)
    assert "optimizer" not in Options(schedule="constant").changes()


def test_words_need_no_quotes() -> None:
    assert expression.parse("allreduce(algorithm=ring)") == AllReduce(algorithm="ring")


@pytest.mark.parametrize(
    ("name", "words"), [("lars", "λ ← η"), ("lamb", "φ(‖x‖)"), ("schedule", "k η"), ("optimizer", "--opt")]
)
def test_explain_shows_the_page_of_a_part_of_training(name: str, words: str, orchestra: Orchestra) -> None:
    said = orchestra("explain", name)
    assert said.code == 0
    assert words in said.out


def test_lists_and_partitions() -> None:
    assert split_strategies("a,b(c=1, d=e(f=2)),g") == ["a", "b(c=1, d=e(f=2))", "g"]
    assert read_partition("dirichlet:0.3") == Dirichlet(alpha=0.3)
    assert read_partition("label-sorted") == LabelSorted()
    with pytest.raises(ConfigError):
        read_partition("iid:3")


# Shares of time.


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.214, 0.277, 0.258], [21, 28, 26, 25]),
        ([0.5, 0.25, 0.25], [50, 25, 25, 0]),
        ([0.9, 0.4, 0.5], [50, 22, 28, 0]),
        ([0.0, 0.0, 0.0], [0, 0, 0, 100]),
        ([0.6, -0.002, 0.3], [60, 0, 30, 10]),
    ],
)
def test_shares_of_time_come_to_a_hundred_percent(shares: list[float], expected: list[int]) -> None:
    assert percents(shares) == expected
    assert sum(percents(shares)) == 100


@pytest.mark.parametrize("command", ["watch", "top"])
def test_ctrl_c_ends_watch_and_top_without_a_message(
    command: str, orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follower, {"watch": "newest", "top": "Latest"}[command], interrupt)
    said = orchestra(command)
    assert (said.code, said.out, said.err) == (130, "", "")
