"""What a search found: a table, words, the flags to copy, and the same as JSON."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from shoal.bench.results.disturbance import warnings_on
from shoal.bench.runs.serve_flags import serve_flags
from shoal.bench.tuning.search import Found
from shoal.bench.tuning.space import AXES, Setting, Space
from shoal.bench.tuning.trial import Status, Trial
from shoal.config import EngineConfig

Column = tuple[str, str, float, int]  # figure, heading, factor, decimals

COLUMNS: tuple[Column, ...] = (
    ("output_tokens_per_second", "tok/s", 1, 0),
    ("good_share", "SLO met", 1, 2),
    ("ttft_p90_ms", "TTFT p90 s", 1e-3, 2),
    ("tpot_p90_ms", "TPOT p90 ms", 1, 0),
)


def command(config: EngineConfig, setting: Setting) -> str:
    """The command that serves with a setting, to be copied into a shell."""
    flags = serve_flags(setting.on(config), ("scheduler", *AXES))
    return shlex.join(["shoal", "serve", config.model, *flags])


def trials_table(found: Found) -> Table:
    """A row for each trial in their order, then the repetitions; as wide as a terminal."""
    rounds = [list(trials.values()) for trials in found.rounds]
    all_trials = [*found.trials, *(trial for trials in rounds for trial in trials)]
    known = {name for trial in all_trials for name in trial.figures}
    columns = [column for column in COLUMNS if column[0] in known]
    has_rates = any(trial.rate for trial in all_trials)
    table = Table(
        title="Settings in the order tried",
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("strategy", no_wrap=True)
    rates = ["req/s"] if has_rates else []
    for heading in ["seqs", "tokens", *rates, *(heading for _, heading, _, _ in columns), "took s"]:
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for trial in found.trials:
        table.add_row(*_cells(trial, columns, has_rates=has_rates), _remark(found, trial))
    for number, trials in enumerate(rounds, start=1):
        table.add_section()
        for trial in trials:
            table.add_row(*_cells(trial, columns, has_rates=has_rates), f"round {number}")
    return table


def _cells(trial: Trial, columns: Sequence[Column], *, has_rates: bool) -> Iterator[str]:
    yield trial.setting.scheduler
    yield str(trial.setting.max_num_seqs)
    yield str(trial.setting.max_num_batched_tokens)
    if has_rates:
        yield f"{trial.rate:.2f}" if trial.rate is not None else ""
    for name, _, factor, decimals in columns:
        value = trial.figures.get(name)
        yield "" if value is None else f"{value * factor:,.{decimals}f}"
    yield f"{trial.seconds:.0f}"


def _remark(found: Found, trial: Trial) -> str:
    if trial.status is not Status.MEASURED:
        return str(trial.status)
    remarks = []
    if trial.setting == found.reference.setting:
        remarks.append("defaults")
    if trial.setting == found.best.setting:
        remarks.append("best")
    return ", ".join(remarks)


def sentences(found: Found, space: Space, config: EngineConfig, share: float | None) -> list[str]:
    """What was found, how sure that is, and what to mind.

    Args:
        found: the result.
        space: what was searched.
        config: the settings that all trials share.
        share: of the requests that has to meet the SLO; None without one.
    """
    return [
        _verdict(found),
        *_on_disturbance(found),
        *_on_slo(found, share),
        *_on_coverage(found),
        *_on_edges(found, space),
        *_on_pool(found, config),
    ]


def _verdict(found: Found) -> str:
    if found.best.setting == found.reference.setting:
        return "Nothing tried is better than the defaults."
    gain = "above 0, which the defaults are at" if math.isinf(found.gain) else f"{found.gain:+.1%}"
    if found.gain <= 0:
        return "No more than with the defaults; what differs is at most the mean latency."
    margin = f"Margin over the defaults: {gain}"
    if found.noise is None:
        once = "measured once"
        if found.rounds:
            once = f"in a single round, {found.first_gain:+.1%} when they were first tried"
        return f"{margin}, {once}: whether that is noise isn't known."
    spread = f"repetitions differ by up to {found.noise:.1%}"
    if found.gain <= found.noise:
        return f"{margin}, within the noise ({spread}): the defaults do as well."
    if (lowest := min(found.gains)) <= 0:
        rounds = f"{lowest:+.1%} in the worst of {len(found.gains)} rounds"
        return f"{margin}, but {rounds} ({spread}): the defaults may do as well."
    return f"{margin}, beyond the noise ({spread})."


def _on_slo(found: Found, share: float | None) -> Iterator[str]:
    figures = found.best.figures
    if share is None:
        return
    if "good_share" not in figures:
        yield "No rate tried meets the SLO, not even with hardly any load: it asks for too much."
    elif figures["good_share"] < share:
        yield (
            f"No setting tried meets the SLO for {share:.0%} of the requests; the best does for "
            f"{figures['good_share']:.0%}: offer less, ask for less, or use another machine."
        )


def _on_coverage(found: Found) -> Iterator[str]:
    count = f"{len(found.trials)} settings tried"
    times = {0: "none", 1: "the best once"}.get(
        len(found.rounds), f"the best {len(found.rounds)} times"
    )
    spent = f"{count}, {times} again, in {found.seconds / 60:.1f} minutes"
    if found.unreached:
        yield f"{spent}; the budget didn't reach: {', '.join(found.unreached)}."
    else:
        yield f"{spent}; the search came to its end."


def _on_edges(found: Found, space: Space) -> Iterator[str]:
    setting = found.best.setting
    if space.holds_all(setting, "max_num_seqs"):
        yield (
            f"max_num_seqs {setting.max_num_seqs} holds all {space.num_requests} requests of a "
            "trial: give more num_requests to tell larger values apart."
        )
    for axis in found.edges:
        value, grid = getattr(setting, axis), space.grid(setting, axis)
        if value not in {grid[0], grid[-1]}:
            yield (
                f"{axis} {value} is at the edge of what was tried: a larger budget_minutes may "
                "find a better one beyond."
            )
        elif not space.holds_all(setting, axis):
            yield f"{axis} {value} is the end of what is searched: try values beyond it by hand."


def _on_pool(found: Found, config: EngineConfig) -> Iterator[str]:
    preempted = [
        trial.setting.max_num_seqs for trial in found.trials if trial.figures.get("preemptions")
    ]
    if preempted:
        yield (
            f"With {min(preempted)} sequences and more, requests were preempted: the KV pool of "
            f"{config.kv_cache_memory_mib} MiB (kv_cache_memory_mib) limits what was found."
        )


def _on_disturbance(found: Found) -> list[str]:
    trials = [(f"{trial.setting}", trial.figures) for trial in found.trials]
    for number, of_round in enumerate(found.rounds, start=1):
        trials += [
            (f"{trial.setting}, round {number}", trial.figures) for trial in of_round.values()
        ]
    return warnings_on(dict(trials), "trials")


def as_json(found: Found) -> dict[str, Any]:
    """Everything that was tried, and what is best."""
    return {
        "best": asdict(found.best.setting),
        "defaults": asdict(found.reference.setting),
        "gain": found.gain if math.isfinite(found.gain) else None,
        "noise": found.noise,
        "unreached": found.unreached,
        "seconds": found.seconds,
        "trials": [_trial_as_json(trial) for trial in found.trials],
        "rounds": [[_trial_as_json(t) for t in trials.values()] for trials in found.rounds],
    }


def _trial_as_json(trial: Trial) -> dict[str, Any]:
    return asdict(trial.setting) | {
        "status": trial.status,
        "rate": trial.rate,
        "seconds": trial.seconds,
        "score": trial.score.value if trial.score is not None else None,
        "figures": trial.figures,
        "message": trial.message,
    }
