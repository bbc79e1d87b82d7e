"""Batching strategies: which requests run in a step, and how many tokens of each."""

from shoal.config import EngineConfig, SchedulerName
from shoal.kv.manager import KVCacheManager
from shoal.scheduler.continuous import ContinuousScheduler
from shoal.scheduler.dynamic import DynamicScheduler
from shoal.scheduler.interface import Scheduler
from shoal.scheduler.static import StaticScheduler

_STRATEGIES: dict[SchedulerName, type[StaticScheduler | DynamicScheduler | ContinuousScheduler]] = {
    "static": StaticScheduler,
    "dynamic": DynamicScheduler,
    "continuous": ContinuousScheduler,
}


def create_scheduler(config: EngineConfig, num_blocks: int, max_model_len: int) -> Scheduler:
    """The strategy that `config.scheduler` names, over a pool of `num_blocks` KV blocks."""
    strategy = _STRATEGIES[config.scheduler]
    return strategy(config, KVCacheManager(num_blocks), max_model_len)
