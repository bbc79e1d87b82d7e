"""What a comparison means, in words: which strategy to take, and which limits to change."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from shoal.bench.comparison.comparison import AT_ONCE, Comparison, Run
from shoal.bench.results.disturbance import TAKEN, is_disturbed
from shoal.config import EngineConfig

MANY_IDLE_SLOTS = 0.75  # below this utilisation a batch's shape is worth a word
LOW_KV_USAGE = 0.6
HIGH_KV_USAGE = 0.9  # admission keeps the rest for the running ones to grow
LONG_QUEUE_SHARE = 0.5  # of the time to first token
CLEAR_WIN = 1.05  # closer than this is noise


def advice_on(comparison: Comparison) -> list[str]:
    """Sentences for the report, the most important first.

    Each says which load it is about, and if others used the machine meanwhile.
    """
    sentences = [_on_throughput(comparison)]
    if comparison.loaded:
        sentences += [_on_latency(comparison), *_on_crossover(comparison)]
    sentences += _on_idle_slots(comparison)
    best = min(comparison.highest_load.values(), key=_latency)
    where = _at(max(comparison.loaded)) if comparison.loaded else AT_ONCE.capitalize()
    return sentences + [
        _hedged(f"{where}, {best.strategy}: {sentence}", [best])
        for sentence in _on_limits(comparison.configs[best.strategy], best)
    ]


def crossover(comparison: Comparison, winner: str, other: str) -> float | None:
    """The load from which on `winner` has the lower mean latency, by linear interpolation.

    Returns 0.0 when it wins at every load that was measured, None when it never does at the last.
    """
    gaps = [
        (load, runs[other].figures["e2e_mean_ms"] - runs[winner].figures["e2e_mean_ms"])
        for load, runs in sorted(comparison.loaded.items())
    ]
    if not gaps or gaps[-1][1] <= 0:
        return None
    for (load, gap), (next_load, next_gap) in reversed(list(pairwise(gaps))):
        if gap <= 0:
            return load + (next_load - load) * -gap / (next_gap - gap)
    return 0.0


def _on_throughput(comparison: Comparison) -> str:
    runs = sorted(comparison.at_once.values(), key=lambda run: -_throughput(run))
    first, *others = runs
    sentence = f"All at once, {first.strategy} has the highest throughput: {_throughput(first):.0f}"
    ratios = [f"{_throughput(first) / _throughput(run):.2f}x {run.strategy}" for run in others]
    sentence += f" output tokens/s, {' and '.join(ratios)}." if ratios else " output tokens/s."
    return _hedged(sentence, runs)


def _on_latency(comparison: Comparison) -> str:
    load = max(comparison.loaded)
    runs = sorted(comparison.loaded[load].values(), key=_latency)
    first, *others = runs
    sentence = f"{_at(load)} the mean latency is {_latency(first):.2f} s with {first.strategy}"
    rest = [f"{_latency(run):.2f} s with {run.strategy}" for run in others]
    if others and _latency(others[0]) < _latency(first) * CLEAR_WIN:
        choice = f"{first.strategy} and {others[0].strategy} are too close to tell apart"
    elif any(is_disturbed(run.figures) for run in runs):
        choice = f"{first.strategy} may be the best choice for this load"
    else:
        choice = f"choose {first.strategy} for this load"
    return _hedged(f"{', '.join([sentence, *rest])}: {choice}.", runs)


def _on_crossover(comparison: Comparison) -> list[str]:
    sentences = []
    low, high = min(comparison.loaded), max(comparison.loaded)
    for other in comparison.configs:
        if other == "continuous" or "continuous" not in comparison.configs:
            continue
        load = crossover(comparison, "continuous", other)
        if load is None:
            sentence = f"{_at(high)}, the highest measured, {other} has the lower mean latency."
        elif load == 0.0:
            sentence = (
                f"Continuous has a lower mean latency than {other} at every load measured, "
                f"{low:.0%} to {high:.0%}."
            )
        else:
            sentence = f"Continuous begins to win over {other} at about {load:.0%} load."
        runs = [runs[name] for runs in comparison.loaded.values() for name in ("continuous", other)]
        sentences.append(_hedged(sentence, runs))
    return sentences


def _on_idle_slots(comparison: Comparison) -> list[str]:
    return [
        f"All at once, {run.strategy} used {run.figures['slot_utilization']:.0%} of its slots: "
        "answers differ in length, and short ones wait for the longest of their batch."
        for run in comparison.at_once.values()
        if run.strategy != "continuous" and run.figures["slot_utilization"] < MANY_IDLE_SLOTS
    ]


def _on_limits(config: EngineConfig, run: Run) -> list[str]:
    """What the best strategy's figures say about its limits."""
    figures = run.figures
    sentences = []
    waits_long = figures["queue_time_mean_ms"] > LONG_QUEUE_SHARE * figures["ttft_mean_ms"]
    has_queue = any(step.num_waiting > 0 for step in run.outcome.engine.steps)
    if figures["preemptions"] > 0:
        sentences.append(
            f"{figures['preemptions']:.0f} preemptions: the KV pool is too small for "
            f"{config.max_num_seqs} sequences; raise kv_cache_memory_mib or lower max_num_seqs."
        )
    elif has_queue and figures["kv_cache_usage_max"] < LOW_KV_USAGE:
        sentences.append(
            f"Requests waited while at most {figures['kv_cache_usage_max']:.0%} of the KV pool was "
            f"in use: a larger max_num_seqs than {config.max_num_seqs} may serve them sooner."
        )
    if waits_long and figures["preemptions"] == 0:
        is_memory_full = figures["kv_cache_usage_max"] > HIGH_KV_USAGE
        remedy = "a larger kv_cache_memory_mib" if is_memory_full else "more slots"
        sentences.append(
            f"{figures['queue_time_mean_ms'] / figures['ttft_mean_ms']:.0%} of the time to first "
            f"token is waiting in the queue: this load needs {remedy}, or another machine."
        )
    return sentences


def _at(load: float) -> str:
    return f"At {load:.0%} load"


def _hedged(sentence: str, runs: Iterable[Run]) -> str:
    """The sentence, with a doubt if others had much of the machine in one of its runs."""
    shares = [run.figures[TAKEN] for run in runs if is_disturbed(run.figures)]
    if not shares:
        return sentence
    return (
        f"{sentence} Uncertain: other processes had up to {max(shares):.0%} of the CPUs meanwhile."
    )


def _throughput(run: Run) -> float:
    return run.figures["output_tokens_per_second"]


def _latency(run: Run) -> float:
    return run.figures["e2e_mean_ms"] / 1e3
