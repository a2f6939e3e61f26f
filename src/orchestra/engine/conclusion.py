# SPDX-License-Identifier: Apache-2.0
"""The conclusion of a run after its training: the model, the scores, the summary.

The model is written first, since scoring may take long and be interrupted. If the disk is full, every write is tried
again for some seconds; then the model is written to the system's folder for temporary files, and the error says where
it is and how to conclude the run once there is room.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from orchestra.engine import checkpoint, snapshot
from orchestra.engine.runner import Ending
from orchestra.engine.scoring import Scorer, Show
from orchestra.engine.snapshot import FINAL, is_full, trying_again
from orchestra.errors import EnvironmentProblem, Interrupted, RunFolderGone
from orchestra.runs import run_lock
from orchestra.runs.facts import Facts, facts_of


@dataclass(frozen=True)
class Conclusion:
    """Writes the results of one run to its folder."""

    folder: Path
    launch: str
    module: nn.Module
    scorer: Scorer
    keep_snapshots: bool
    how_to_resume: str

    def conclude(self, how: Ending, show: Show) -> tuple[dict[str, float], Facts]:
        """Write everything; return the scores of the final model, and the facts of the run."""
        elsewhere = snapshot.elsewhere(self.launch)
        if run_lock.is_gone(self.folder):
            raise RunFolderGone(self.folder)
        try:
            rescued = [elsewhere / FINAL] if snapshot.is_ours(elsewhere) else []
            parts = snapshot.parts(*rescued, self.folder / FINAL)
            snapshot.load_into(self.module, parts)
            self.module.eval()
            self._write_model()
            metrics = self._score(how, parts, show)
            facts = trying_again(lambda: self._write_facts(how))
        except OSError as error:
            if run_lock.is_gone(self.folder):
                raise RunFolderGone(self.folder) from None
            if not is_full(error):
                raise
            raise EnvironmentProblem(
                f"the disk of {self.folder} is full: {error.strerror}. The trained model is whole: "
                f"{self.folder / snapshot.MODEL}. {self._then}"
            ) from None
        if rescued:
            shutil.rmtree(elsewhere, ignore_errors=True)
        if metrics is None:
            raise Interrupted(
                "stopped by SIGINT while the trained model was being scored. Training had ended, and the model is "
                f"whole: {self.folder / snapshot.MODEL}"
            )
        return metrics, facts

    def _write_model(self) -> None:
        try:
            snapshot.export_or_rescue(self.module, self.folder, self.launch)
        except EnvironmentProblem as error:
            raise EnvironmentProblem(f"{error} {self._then}") from None

    @property
    def _then(self) -> str:
        """Advice for a full disk."""
        if any((self.folder / "checkpoints").glob("step-*[0-9]")):
            return f"Make room, and conclude the run with {self.how_to_resume}"
        return "The run kept no checkpoint to resume from (checkpoint_every=..., --checkpoint-every)."

    def _score(self, how: Ending, parts: list[snapshot.SnapshotPart], show: Show) -> dict[str, float] | None:
        """Score all remaining snapshots and the final model; return the latter's scores, None if interrupted."""
        scorer = self.scorer
        try:
            scorer.rest(show)
            metrics = scorer.last(max(scorer.done, default=0) + 1, parts).metrics
        except KeyboardInterrupt:
            how.warnings.append("scoring was interrupted: some snapshots have no scores, nor has the final model")
            metrics = None
        how.warnings.extend(scorer.warnings)
        return metrics

    def _write_facts(self, how: Ending) -> Facts:
        shutil.rmtree(self.folder / FINAL, ignore_errors=True)
        if not self.keep_snapshots:
            shutil.rmtree(self.folder / "snapshots", ignore_errors=True)
        ending = {"stopped_by": how.stopped_by, "warnings": how.warnings}
        self._write("ending.json", ending)
        facts = facts_of(self.folder)
        if facts.missing is not None and not any(facts.missing in warning for warning in how.warnings):
            how.warnings.append(f"{facts.strategy}: {facts.missing}")
            self._write("ending.json", ending)
        if facts.warning is not None and facts.warning not in how.warnings:
            how.warnings.append(facts.warning)
            self._write("ending.json", ending)
        self._write("summary.json", facts.as_dict())
        return facts

    def _write(self, name: str, what: object) -> None:
        checkpoint.write_text(self.folder / name, json.dumps(what, indent=1))
