import asyncio
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.client import timer
from shoal.bench.client.timer import Timer, busy_seconds


async def ends_of(offsets):
    """When waits that begin together end, each less the time for which it waited."""
    ends = [0.0] * len(offsets)
    start = time.monotonic() + 0.01

    async def wait(index, when):
        await waiting.wait_until(when)
        ends[index] = time.monotonic() - when

    with Timer() as waiting:
        await asyncio.gather(*(wait(i, start + offset) for i, offset in enumerate(offsets)))
    return ends


async def test_no_wait_ends_before_its_time_however_many_there_are():
    rng = random.Random(5)
    offsets = [rng.random() * 0.1 for _ in range(200)]
    assert min(await ends_of(offsets)) >= 0.0


async def test_a_wait_that_ends_sooner_than_one_under_way_is_not_late_for_it():
    late_end, soon_end = await ends_of([0.5, 0.02])
    assert late_end >= 0.0
    assert soon_end < 0.4


async def test_most_waits_end_within_a_tick_of_an_event_loop():
    ends = await ends_of([0.003 * i for i in range(40)])
    assert sorted(ends)[len(ends) // 2] < 1e-3


@pytest.mark.parametrize("when", [0.0, float("-inf")])
async def test_a_time_that_is_past_is_not_waited_for(when):
    with Timer() as waiting:
        turn = asyncio.create_task(asyncio.sleep(0))
        await waiting.wait_until(when)
        assert not turn.done()


async def test_a_wait_that_is_cancelled_does_not_keep_the_others_from_ending():
    with Timer() as waiting:
        now = time.monotonic()
        waits = [asyncio.create_task(waiting.wait_until(now + at)) for at in (0.02, 0.05)]
        await asyncio.sleep(0)
        waits[0].cancel()
        await waits[1]
    assert waits[0].cancelled()


@given(st.lists(st.floats(0, 100)))
def test_little_of_the_time_between_the_waits_is_spent_busily(times):
    spent, newest = 0.0, 0.0
    for when in times:
        busy = busy_seconds(when - newest)
        assert 0.0 <= busy <= timer.MAX_BUSY_SECONDS
        spent += busy
        newest = max(newest, when)
    assert spent <= timer.MAX_BUSY_SHARE * newest * (1 + 1e-9)


async def test_a_system_without_timers_is_an_error():
    class Limited:
        def timerfd_create(self, *_):
            timer.ctypes.set_errno(24)
            return -1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer, "_libc", Limited())
        with pytest.raises(OSError, match="Too many open files"), Timer():
            pass
