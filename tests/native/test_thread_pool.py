"""The pool runs every task once, also with more threads than processors."""

import threading

import numpy as np
import pytest

from shoal._native import kernels


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_every_task_runs_once_in_each_loop(num_threads: int, count: int) -> None:
    runs = kernels.count_tasks(num_threads, count, 50)  # pairs of loops
    np.testing.assert_array_equal(runs, np.full(count, 2 * 50))


def test_pools_that_compete_for_the_processors_all_finish() -> None:
    results: list[np.ndarray] = []

    def run() -> None:
        results.append(kernels.count_tasks(4, 64, 500))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for runs in results:
        np.testing.assert_array_equal(runs, np.full(64, 2 * 500))
    assert len(results) == 4


@pytest.mark.parametrize("num_threads", [0, -1])
def test_a_pool_needs_a_thread(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {num_threads}"):
        kernels.count_tasks(num_threads, 1, 1)
