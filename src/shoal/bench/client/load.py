"""Sends the requests of a workload to a server and keeps what came of each."""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.bench.client.connection import Connection, Response, TransportError
from shoal.bench.client.stream import AnswerStream, error_message
from shoal.bench.client.target import Target
from shoal.bench.client.timer import Clock, Timer
from shoal.bench.results.measure import RequestTimeline
from shoal.bench.workloads.arrivals import Arrivals, ClosedLoop, OpenLoop
from shoal.bench.workloads.workload import WorkloadRequest

REFUSED = "refused"  # status 429: the server said no at once, as it should when its queue is full

# How long before it is due a request gets its connection: longer than it takes to open one.
PREPARE_SECONDS = 0.1

OnEnd = Callable[[int, int], None]  # is told how many requests have ended, and how many there are


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request brought no complete answer: one word for the kind, and what was said."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What came of one request; times are seconds on the clock of the run.

    `scheduled` is when it was to be sent and `sent` when it was; its figures count from the first.
    `counted` says that the server's usage counted its tokens, else they are chunks.
    """

    scheduled: float
    sent: float
    end: float
    result: RequestTimeline | Failure
    counted: bool = True


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The records of a run in the order in which they ended, and what the run itself used."""

    records: list[RequestRecord]
    start: float
    cpu_seconds: float  # of this process
    wall_seconds: float

    @property
    def timelines(self) -> list[RequestTimeline]:
        """The completed requests."""
        return [r.result for r in self.records if isinstance(r.result, RequestTimeline)]

    @property
    def failures(self) -> list[Failure]:
        """The others, refused ones included."""
        return [r.result for r in self.records if isinstance(r.result, Failure)]

    @property
    def failures_by_kind(self) -> Counter[str]:
        """How many failures of each kind there were."""
        return Counter(failure.kind for failure in self.failures)

    @property
    def num_uncounted(self) -> int:
        """Completed requests whose tokens the server didn't count."""
        return sum(isinstance(r.result, RequestTimeline) and not r.counted for r in self.records)

    @property
    def cpu_share(self) -> float:
        """What this process used of one core; at 1 the load generator is the bottleneck."""
        return self.cpu_seconds / self.wall_seconds

    @property
    def mean_in_flight(self) -> float:
        """Requests under way, averaged over the run: the sum of their times / duration."""
        span = max(record.end for record in self.records) - self.start
        return sum(record.end - record.sent for record in self.records) / span

    @property
    def max_in_flight(self) -> int:
        """Most requests under way at once; one that ends makes room before the next begins."""
        changes = [(record.sent, 1) for record in self.records]
        changes += [(record.end, -1) for record in self.records]
        return max(accumulate(change for _, change in sorted(changes)))

    @property
    def send_delays(self) -> list[float]:
        """How much later than scheduled each request was sent; part of its TTFT."""
        return [record.sent - record.scheduled for record in self.records]


async def run_load(
    target: Target,
    requests: Sequence[WorkloadRequest],
    arrivals: Arrivals,
    *,
    on_end: OnEnd | None = None,
    clock: Clock = time.monotonic,
) -> LoadRun:
    """Send all requests and wait for their answers; failures are records, not exceptions.

    Args:
        target: the server.
        requests: what is asked, in the order of sending.
        arrivals: when each is sent.
        on_end: called when a request has ended, with the number of those that have, and of all.
        clock: seconds on the monotonic clock of the target's client.
    """
    outgoing = [target.request(request) for request in requests]
    await target.client.warm_up(_num_first(arrivals, len(outgoing)))
    with Timer(clock) as timer:
        sender = _Sender(target, clock, timer, len(outgoing), on_end)
        cpu, wall = time.process_time(), time.monotonic()
        start = clock()
        if isinstance(arrivals, ClosedLoop):
            await _run_closed(sender, outgoing, arrivals)
        else:
            await _run_open(sender, outgoing, arrivals, start)
    return LoadRun(sender.records, start, time.process_time() - cpu, time.monotonic() - wall)


def _num_first(arrivals: Arrivals, num_requests: int) -> int:
    """How many requests are due too soon after the start to connect in time for them."""
    if isinstance(arrivals, ClosedLoop):
        return min(arrivals.concurrency, num_requests)
    return bisect_right(arrivals.times, PREPARE_SECONDS)


async def _run_open(
    sender: _Sender, outgoing: Sequence[bytes], arrivals: OpenLoop, start: float
) -> None:
    async with asyncio.TaskGroup() as group:
        for request, offset in zip(outgoing, arrivals.times, strict=True):
            await sender.approach(start + offset)
            group.create_task(sender.send_at(start + offset, request))


async def _run_closed(sender: _Sender, outgoing: Sequence[bytes], arrivals: ClosedLoop) -> None:
    waiting = iter(outgoing)
    rng = random.Random(f"users {arrivals.seed}")
    async with asyncio.TaskGroup() as group:
        for _ in range(min(arrivals.concurrency, len(outgoing))):
            delay = rng.random() * arrivals.think_time
            group.create_task(_run_user(sender, waiting, delay, arrivals.think_time))


async def _run_user(
    sender: _Sender, outgoing: Iterator[bytes], delay: float, think_time: float
) -> None:
    for request in outgoing:
        scheduled = sender.clock() + delay
        await sender.approach(scheduled)
        await sender.send_at(scheduled, request)
        delay = think_time


class _Sender:
    """Sends single requests and collects their records."""

    def __init__(
        self,
        target: Target,
        clock: Clock,
        timer: Timer,
        num_requests: int,
        on_end: OnEnd | None,
    ) -> None:
        self._target = target
        self._timer = timer
        self._num_requests = num_requests
        self._on_end = on_end
        self.clock = clock
        self.records: list[RequestRecord] = []

    async def approach(self, scheduled: float) -> None:
        """Sleep until a request that is due at `scheduled` should be prepared."""
        if (remaining := scheduled - PREPARE_SECONDS - self.clock()) > 0:
            await asyncio.sleep(remaining)

    async def send_at(self, scheduled: float, request: bytes) -> None:
        """Send a request when it is due, and wait for the end of its answer."""
        record = await self._send(scheduled, request, await self._target.client.reserve())
        self.records.append(record)
        if self._on_end is not None:
            self._on_end(len(self.records), self._num_requests)

    async def _send(
        self, scheduled: float, request: bytes, connection: Connection | None
    ) -> RequestRecord:
        """Wait and send. What can be made before the request is due is made before."""
        stream, raw = AnswerStream(), bytearray()
        sent = scheduled
        response: Response | None = None
        failure: Failure | None = None

        def take(piece: bytes, now: float) -> None:
            stream.feed(piece, now)
            if not stream.has_events:
                raw.extend(piece)

        try:
            wait = max(0.0, scheduled - self.clock())
            async with asyncio.timeout(wait + self._target.config.request_timeout):
                await self._timer.wait_until(scheduled)
                sent = self.clock()
                response = await self._target.client.send(request, take, connection)
        except TimeoutError:
            limit = self._target.config.request_timeout
            failure = Failure("timeout", f"no complete answer within {limit:g} s")
        except TransportError as error:
            failure = Failure(error.kind, str(error))
        if response is not None:
            failure = failure_of(response, stream, bytes(raw))
        elif stream.error is not None:
            failure = Failure("error_event", stream.error)
        return RequestRecord(
            scheduled,
            sent,
            response.end if response is not None else self.clock(),
            failure if failure is not None else timeline_of(stream, scheduled),
            counted=stream.usage is not None,
        )


def failure_of(response: Response, stream: AnswerStream, raw: bytes) -> Failure | None:
    """Why a response that came to its end is no complete answer; None if it is one.

    Args:
        response: the head.
        stream: what its body held.
        raw: the body as far as it was no stream of events.
    """
    if response.status == 429:
        return Failure(REFUSED, error_message(raw))
    if response.status != 200:
        return Failure(f"http_{response.status}", error_message(raw))
    if response.content_type != "text/event-stream":
        return Failure("not_streamed", f"the answer is {response.content_type or 'untyped'}")
    return _failure_in(stream)


def _failure_in(stream: AnswerStream) -> Failure | None:
    if stream.error is not None:
        return Failure("error_event", stream.error)
    if stream.finish_reason is None:
        return Failure("no_finish", "the stream ended without a finish_reason")
    if stream.finish_reason in {"error", "abort"}:
        return Failure(f"finish_{stream.finish_reason}", "the server gave up the answer")
    if stream.num_tokens == 0:
        return Failure("empty", "the answer has no token")
    return None


def timeline_of(stream: AnswerStream, scheduled: float) -> RequestTimeline:
    """The times and counts of a complete answer.

    A token without text has no chunk. Where there are fewer chunks than tokens, the last token is
    taken to have come with the finish_reason, and so is the first if no chunk has text.
    """
    times = stream.chunk_times
    usage = stream.usage
    last = times[-1] if times else stream.finish_time
    if len(times) < stream.num_tokens:
        last = max(last, stream.finish_time)
    return RequestTimeline(
        sent=scheduled,
        first_token=times[0] if times else stream.finish_time,
        last_token=last,
        num_input_tokens=usage.prompt_tokens if usage is not None else 0,
        num_output_tokens=stream.num_tokens,
        chunk_times=times,
        num_cached_tokens=usage.cached_tokens if usage is not None else None,
    )
