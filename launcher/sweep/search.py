"""``--optuna``: the runs of a sweep are trials, of which each new one depends on the results of those before.

The study is in a journal in the sweep's folder. A trial whose process ended with an earlier sweep is asked for again
with the same values, and continues the run folder that it has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.child import in_child
from launcher.comparison.curves import curves
from launcher.comparison.groups import ComparedRun
from launcher.comparison.tables import different_tests
from launcher.comparison.test_sets import differing, names
from launcher.facts.summary import measured_seconds, summarize
from launcher.facts.sweep_folder import SweepFolder, SweepRun
from launcher.formatting import percent
from launcher.sweep import space as spaces
from launcher.sweep.grid import run_name
from launcher.sweep.jobs import Job
from launcher.sweep.plan import plan_trial
from launcher.sweep.runner import RunSource
from p2pfl.errors import MissingExtra

if TYPE_CHECKING:
    import optuna


def _optuna() -> Any:
    """Import optuna, which takes a second. Raises MissingExtra."""
    try:
        import optuna
    except ImportError:
        raise MissingExtra("optuna", "optuna", "p2pfl sweep --optuna") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Search(RunSource):
    """The trials of a search, as the runs of a sweep."""

    def __init__(self, folder: SweepFolder) -> None:
        self._optuna = _optuna()
        self._folder = folder
        search = folder.sweep.search
        assert search is not None
        self._space = spaces.parse(search)
        self._settings = self._space.settings
        self._seed: int = search["seed"]
        self._returned: list[str] = []
        self.halted = False
        """Whether a trial could not start: no further ones are asked for until the search is continued."""
        self._trials: dict[str, optuna.trial.Trial] = {}
        """The trials of this process, by run."""
        self._points: dict[str, SweepRun] = {}
        """Their runs, with the values."""
        self._reported: dict[str, int] = {}
        """Completed rounds of which the study knows, by run."""
        # The lock of a sweep that was killed. No other one is at work: this process has locked the folder.
        Path(f"{folder.trials}.lock").unlink(missing_ok=True)
        self._study = self._open()
        states = self._states()
        self._begun = len(states)
        """Runs that this or an earlier sweep has begun."""
        ended = self._optuna.trial.TrialState
        self.finished = sum(state in (ended.COMPLETE, ended.PRUNED) for state in states.values())
        self.failed = [name for name, state in states.items() if state == ended.FAIL]
        self._interrupted = {name for name, state in states.items() if state in (ended.RUNNING, ended.WAITING)}
        self._enqueue_again()

    @property
    def total(self) -> int:
        return max(self._settings.trials, self._begun)

    def _open(self) -> optuna.study.Study:
        library = self._optuna
        journal = library.storages.journal
        path = str(self._folder.trials)
        backend = journal.JournalFileBackend(path, journal.JournalFileOpenLock(path))
        study: optuna.study.Study = library.create_study(
            study_name="p2pfl",
            storage=library.storages.JournalStorage(backend),
            direction="maximize",
            load_if_exists=True,
        )
        # Not the same seed again after each resume: it would draw the same values.
        study.sampler = library.samplers.TPESampler(seed=self._seed + len(study.trials), constant_liar=True)
        study.pruner = (
            library.pruners.MedianPruner(
                n_startup_trials=self._settings.startup, n_warmup_steps=self._settings.warmup
            )
            if self._settings.prune
            else library.pruners.NopPruner()
        )
        return study

    def _states(self) -> dict[str, Any]:
        """Return the state of each run's last trial."""
        return {trial.user_attrs["run"]: trial.state for trial in self._study.trials if "run" in trial.user_attrs}

    def _enqueue_again(self) -> None:
        """Ask for the trials of an earlier process again: a trial belongs to the process that has asked for it."""
        states = self._optuna.trial.TrialState
        trials = self._study.trials
        waiting = {trial.user_attrs.get("run") for trial in trials if trial.state == states.WAITING}
        for trial in trials:
            if trial.state == states.RUNNING:
                name = trial.user_attrs.get("run")
                if name is not None and name not in waiting:  # first: a kill may come in between
                    self._study.enqueue_trial(trial.params, user_attrs={"run": name})
                self._study.tell(trial.number, state=states.FAIL)

    def next(self) -> str | None:
        if self._returned:
            return self._returned.pop()
        if self.halted:
            return None
        again = bool(self._interrupted)
        if not again and self._begun >= self._settings.trials:
            return None
        trial = self._study.ask()
        values = {key: self._suggest(trial, key) for key in self._space.axes}
        name = trial.user_attrs.get("run")
        labels = {key: spaces.label(value) for key, value in values.items()}
        if name is None:
            taken = {point.name for point in self._folder.sweep.points}
            name = run_name(labels, self._seed, taken | self._states().keys())  # invalid trials are in the study only
            trial.set_user_attr("run", name)
            self._begun += 1
        else:
            self._interrupted.discard(name)
        self._trials[name] = trial
        self._points[name] = SweepRun(name, labels, self._seed, values)
        return str(name)

    def prepare(self, name: str) -> None:
        point = self._points[name]
        if not self._folder.plan(name).is_file():
            in_child(lambda: plan_trial(self._folder, point))
        if all(known.name != name for known in self._folder.sweep.points):
            self._folder.add(point)

    def _suggest(self, trial: optuna.trial.Trial, key: str) -> Any:
        found = self._space.axes[key]
        if isinstance(found, list):  # of anything; optuna stores texts and numbers
            return json.loads(str(trial.suggest_categorical(key, [json.dumps(value) for value in found])))
        if found.integer:
            return trial.suggest_int(key, int(found.low), int(found.high), step=int(found.step or 1), log=found.log)
        return trial.suggest_float(key, found.low, found.high, step=found.step, log=found.log)

    def back(self, name: str) -> None:
        self._returned.append(name)

    def prunes(self, job: Job) -> bool:
        """Report the accuracies that have been recorded since the last call, and ask whether to go on."""
        snapshot = job.snapshot()
        done = min(snapshot.done) if snapshot is not None else 0
        known = self._reported.get(job.name, 0)
        if done <= known:
            return False
        trial = self._trials[job.name]
        for point in self._curve(job.name):
            if known < point.rounds <= done:
                trial.report(point.accuracy, point.rounds)
        self._reported[job.name] = done
        assert snapshot is not None
        return done < snapshot.rounds and bool(trial.should_prune())

    def _curve(self, name: str) -> Any:
        folder = self._folder.run(name)
        return curves(folder, bool(folder.settings.get("masked_test"))).rounds

    def not_started(self, name: str) -> None:
        self.halted = True  # the study still has the trial as running: continuing the search asks for it again

    def ended(self, job: Job, failure: str) -> None:
        states = self._optuna.trial.TrialState
        trial = self._trials[job.name]
        value = None if failure else self._value(job.name)
        if value is not None:
            self._study.tell(trial, value)
        else:
            self._study.tell(
                trial, state=states.PRUNED if job.pruned and self._reported.get(job.name) else states.FAIL
            )

    def _value(self, name: str) -> float | None:
        folder = self._folder.run(name)
        accuracy = summarize(folder, seconds=measured_seconds(folder)).accuracy
        if accuracy is None:
            return None
        return accuracy.mean if self._settings.objective == "accuracy" else accuracy.worst_tenth

    def _done(self) -> list[optuna.trial.FrozenTrial]:
        """The trials that have finished, the best first."""
        done = [trial for trial in self._study.trials if trial.state == self._optuna.trial.TrialState.COMPLETE]
        return sorted(done, key=lambda trial: (-(trial.value or 0.0), trial.number))

    def best(self) -> list[str]:
        """Return the runs that have finished, the best first."""
        return [str(trial.user_attrs["run"]) for trial in self._done()]

    def report(self) -> list[str]:
        """Say which trial was best, if all were tested on the same samples."""
        done = self._done()
        if not done:
            return ["no trial has finished"]
        tested = [ComparedRun.of(self._folder.run(trial.user_attrs["run"]), None) for trial in done]
        test_sets = names([[member] for member in tested], any(member.values["masked_test"] for member in tested))
        if len(set(test_sets)) > 1:
            return [f"no trial is called the best. {different_tests(differing(tested))}"]
        best = done[0]
        name = best.user_attrs["run"]
        values: Mapping[str, str] = {
            key: value if isinstance(value, str) else f"{value!r}" for key, value in best.params.items()
        }
        sets = " ".join(f"--set '{key}={value}'" for key, value in values.items())
        return [
            f"best of {len(done)} finished trials: {name}, {self._settings.objective} {percent(best.value)} %: {sets}"
        ]
