"""Batching strategies: which requests run in a step, and how many tokens of each."""

from shoal.config import EngineConfig
from shoal.kv.manager import KVCacheManager
from shoal.scheduler.continuous import ContinuousScheduler
from shoal.scheduler.interface import Scheduler

_STRATEGIES = {"continuous": ContinuousScheduler}


def create_scheduler(config: EngineConfig, num_blocks: int, max_model_len: int) -> Scheduler:
    """The strategy that `config.scheduler` names, over a pool of `num_blocks` KV blocks."""
    return _STRATEGIES[config.scheduler](config, KVCacheManager(num_blocks), max_model_len)
