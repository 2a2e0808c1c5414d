"""Third script: times of passes that a future engine could use, and the host's share of them."""

from __future__ import annotations

import inspect
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from duplane.tools.bench.peaks import synchronize
from duplane.tools.bench.report import percentile
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.tts.sampling import SpeechRequest
from duplane.worker.models.minicpm_o.vocoder.types import VocoderChunk
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder
from duplane.worker.models.types import ConversationOptions
from measure import Options, Report, checkpoint_directory, load, measured, nothing, read_options

CONDITION_ROWS = 8
TURN_ROWS = 200
"""Rows of the talker's cache in the middle of a turn."""
CHUNK_TOKENS = 28
CHUNK_FRAMES = 58
"""Mel frames of a chunk, including its overlap with the last chunk."""
DECODE_STEPS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; return the exit code."""
    options = read_options(arguments)
    report = Report("passes", options)
    slots, context = (4, 256) if options.small else (32, 8192)
    with report.case("launches"):
        launches(options, report)
    with report.case("host"):
        host(options, report)
    with report.case("packed attention"):
        packed_attention(options, report)
    with checkpoint_directory(options) as directory:
        model = load(options, directory, slots, context, cuda_graphs=True)
    for name, case in (
        ("decoder", decoder),
        ("talker", talker),
        ("vocoder", vocoder),
        ("two streams", two_streams),
    ):
        with report.case(name), torch.inference_mode():
            case(options, report, model)
    return report.exit_code


def repeats(options: Options) -> int:
    """Return how often a call is timed."""
    return 3 if options.small else 15


def is_cuda(options: Options) -> bool:
    """Return whether the device is a GPU."""
    return options.device.type == "cuda"


def launches(options: Options, report: Report) -> None:
    """Measure one operation: eager and in a CUDA graph, on the host and on the device."""
    table = report.table("one launch, microseconds", ("", "host", "device"))
    small = torch.zeros(64, device=options.device)
    count = 100 if options.small else 2000

    def work() -> None:
        for _ in range(count):
            small.add_(1)

    times = measured(options.device, work, repeats(options), nothing)
    table.add("add_, eager", 1e3 * times.host_ms / count, 1e3 * times.device_ms / count)
    if not is_cuda(options):
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = measured(options.device, graph.replay, repeats(options), nothing)
    table.add("add_, in a graph", 1e3 * times.host_ms / count, 1e3 * times.device_ms / count)
    table.add("a whole replay", 1e3 * times.host_ms, 1e3 * times.device_ms)


def host(options: Options, report: Report) -> None:
    """Measure the device's idle time between an event that the host awaits and the next launch."""
    table = report.table("from event to next launch, microseconds", ("other threads", "p50", "p99"))
    if not is_cuda(options):
        table.add("needs CUDA", "", "")
        return
    for name, threads in (("none", 0), ("one busy in Python", 1), ("four busy in Python", 4)):
        stop = threading.Event()
        busy = [threading.Thread(target=_spin, args=(stop,)) for _ in range(threads)]
        for thread in busy:
            thread.start()
        gaps = _gaps(options.device)
        stop.set()
        for thread in busy:
            thread.join()
        table.add(name, percentile(gaps, 0.5), percentile(gaps, 0.99))


def _spin(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


def _gaps(device: torch.device) -> list[float]:
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(matrix)
    gaps: list[float] = []
    for _ in range(300):
        done, following = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.mm(matrix, matrix, out=out)
        done.record()
        done.synchronize()
        following.record()
        following.synchronize()
        gaps.append(1e3 * done.elapsed_time(following))
    return gaps


def packed_attention(options: Options, report: Report) -> None:
    """Measure `varlen_attn`: attention over packed rows that may be independent of each other."""
    title = "varlen_attn of one layer, ms; 32 query heads, 8 key heads of 128 channels"
    table = report.table(title, ("rows per conversation, contexts", "1", "8", "32"))
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        table.add(f"not in this torch: {error}", "", "", "")
        return
    known = inspect.signature(varlen_attn).parameters
    print(f"arguments: {', '.join(known)}")
    if not is_cuda(options):
        table.add("needs CUDA", "", "", "")
        return
    for splits in ({}, {"num_splits": 1}):
        if not set(splits) <= set(known):
            table.add("num_splits is not known to this torch", "", "", "")
            continue
        for rows, context in ((1, 500), (1, 8000), (4, 500), (4, 8000)):
            times = [
                _packed_ms(options, varlen_attn, known, splits, count, rows, context)
                for count in (1, 8, 32)
            ]
            table.add(f"{rows}, {context}, {splits or 'default'}", *times)


def _packed_ms(
    options: Options,
    attend: Any,
    known: Any,
    splits: dict[str, int],
    count: int,
    rows: int,
    context: int,
) -> float:
    device, shared = options.device, "enable_gqa" in known
    heads = 8 if shared else 32

    def random_rows(number: int, width: int) -> Tensor:
        return torch.randn(number, width, 128, device=device, dtype=torch.bfloat16)

    queries, keys = random_rows(count * rows, 32), random_rows(count * context, heads)
    steps = torch.arange(count + 1, device=device, dtype=torch.int32)
    named = {**splits, **({"enable_gqa": True} if shared else {})}

    def call() -> object:
        bounds = (steps * rows, steps * context, rows, context)
        return attend(queries, keys, keys, *bounds, **named)

    return measured(device, call, repeats(options), nothing).device_ms


@contextmanager
def without_graphs(part: Any) -> Generator[None, None, None]:
    """Run the steps of a part without its CUDA graphs."""
    kept, part.graphs = part.graphs, None
    try:
        yield
    finally:
        part.graphs = kept


def hold(cache: KVCache, slots: Sequence[int], length: int) -> None:
    """Fill the cache of each slot with `length` random rows."""
    for slot in slots:
        cache.truncate(slot, 0)
    cache.grow([(slot, length) for slot in slots])
    for tensor in (cache.keys, cache.values):
        tensor.normal_()


def decoder(options: Options, report: Report, model: DuplexModel) -> None:
    """Measure one pass of the language model with 1, 32 and 128 rows and two context lengths."""
    table = report.table("decoder pass, ms", ("conversations x rows, context", "device", "host"))
    llm = model.llm
    counts = ((1, 1), (4, 1), (4, 4)) if options.small else ((1, 1), (32, 1), (32, 4))
    for context in (50, 200) if options.small else (500, 8000):
        for slots, rows in counts:
            pairs = [(slot, rows) for slot in range(slots)]
            hold(llm.cache, range(slots), context)
            embeds = llm.embed([1] * (slots * rows))
            name = f"{slots} x {rows}, {context}"
            for graphs in ("graph", "eager") if rows == 1 and is_cuda(options) else ("eager",):
                if not report.has_time(name):
                    return
                with without_graphs(llm) if graphs == "eager" else nullcontext():
                    times = measured(
                        options.device,
                        lambda pairs=pairs, embeds=embeds: llm.feed(pairs, embeds),
                        repeats(options),
                        lambda slots=slots, context=context: shorten(llm.cache, slots, context),
                    )
                table.add(f"{name}, {graphs}", times.device_ms, times.host_ms)
    for slot in range(model.slot_count):
        llm.cache.reset(slot)


def shorten(cache: KVCache, slots: int, length: int) -> None:
    """Remove the rows that a pass added."""
    for slot in range(slots):
        cache.truncate(slot, length)


def talker_unit(model: DuplexModel, slots: int) -> Callable[[], object]:
    """Return a function that makes the tokens of a second of speech in each slot, within a turn."""
    speaking = model.parts.talker
    assert speaking is not None, "the checkpoint cannot speak"
    hold(speaking.cache, range(slots), TURN_ROWS)
    table = speaking.emb_text.weight
    condition = torch.randn(CONDITION_ROWS, table.shape[1], device=table.device, dtype=table.dtype)

    def call() -> object:
        for slot in range(slots):
            speaking.cache.truncate(slot, TURN_ROWS)
        return speaking.speak(
            [
                SpeechRequest(slot, condition, SeededUniforms(slot), False, 0.8)
                for slot in range(slots)
            ]
        )

    return call


def talker(options: Options, report: Report, model: DuplexModel) -> None:
    """Measure a second of the talker's speech (condition, 25 steps), with and without graphs."""
    table = report.table("talker, a second of speech, ms", ("conversations", "graph", "eager"))
    for slots in (1, 4) if options.small else (1, 4, 16):
        if not report.has_time(f"talker, {slots}"):
            return
        call = talker_unit(model, slots)
        graph = measured(options.device, call, repeats(options), nothing)
        with without_graphs(model.parts.talker):
            eager = measured(options.device, call, repeats(options), nothing)
        table.add(str(slots), graph.device_ms, eager.device_ms)


@contextmanager
def tf32(allowed: bool) -> Generator[None, None, None]:
    """Allow or forbid TF32 in matrix products and convolutions."""
    # The type is `Any`, because this module defines its attributes at run time.
    products, convolutions = torch.backends.cuda.matmul, cast("Any", torch.backends.cudnn)
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = allowed
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def primed(model: DuplexModel, slots: int) -> Vocoder:
    """Return the vocoder with a voice in the first slots."""
    found = model.parts.vocoder
    assert isinstance(found, Vocoder), "the checkpoint has no vocoder"
    for slot in range(slots):
        model.close(slot)
        model.open(slot, ConversationOptions(seed=slot))
    return found


def vocoder(options: Options, report: Report, model: DuplexModel) -> None:
    """Measure a second of speech through flow and HiFT, in float32 and with TF32."""
    table = report.table(
        "vocoder, a second of speech, ms",
        ("conversations, precision", "flow", "flow host", "HiFT", "HiFT host"),
    )
    for slots in (1, 2) if options.small else (1, 4, 8):
        made = primed(model, slots)
        chunks = [VocoderChunk(slot, list(range(CHUNK_TOKENS)), False) for slot in range(slots)]
        mel = torch.randn(slots, made.limits.mel_width, CHUNK_FRAMES, device=options.device)
        hift = made.stream.hift
        for allowed in (False, True):
            name = f"{slots}, {'TF32' if allowed else 'float32'}"
            if not report.has_time(f"vocoder, {name}"):
                return
            with tf32(allowed):
                flow = measured(
                    options.device,
                    lambda made=made, chunks=chunks: made.encode(chunks),
                    repeats(options),
                    nothing,
                )
                wave = measured(
                    options.device,
                    lambda mel=mel, hift=hift: hift(mel, hift.source(mel, None)),
                    repeats(options),
                    nothing,
                )
            table.add(name, flow.device_ms, flow.host_ms, wave.device_ms, wave.host_ms)
    for slot in range(model.slot_count):
        model.close(slot)


def two_streams(options: Options, report: Report, model: DuplexModel) -> None:
    """Measure decode steps and speech on two CUDA streams together, each from its own thread."""
    table = report.table(
        "two streams, ms", ("", "first alone", "second alone", "together", "share of sum")
    )
    slots = 2 if options.small else 32
    speakers = 2 if options.small else 8
    hold(model.llm.cache, range(slots), 50 if options.small else 2000)
    embeds = model.llm.embed([1] * slots)
    length = model.llm.cache.length(0)

    def decode() -> None:
        for _ in range(DECODE_STEPS):
            model.llm.feed([(slot, 1) for slot in range(slots)], embeds)
        shorten(model.llm.cache, slots, length)

    made = primed_vocoder(model, speakers)
    for name, other in (("talker", talker_unit(model, speakers)), ("flow and HiFT", made)):
        if not report.has_time(f"two streams, {name}"):
            return
        first, second = (_alone(options, call) for call in (decode, other))
        both = _together(options, decode, other)
        title = f"{DECODE_STEPS} steps of {slots}; {name} of {speakers}"
        table.add(title, first, second, both, both / (first + second))


def primed_vocoder(model: DuplexModel, speakers: int) -> Callable[[], object]:
    """Return a function that makes a second of sound. The function does not change contexts."""
    made = model.parts.vocoder
    assert isinstance(made, Vocoder), "the checkpoint has no vocoder"
    voice = model.parts.vocoder_voice
    assert voice is not None, "the checkpoint has no voice"
    for slot in range(speakers):
        made.prime(slot, voice, seed=slot)
    chunks = [VocoderChunk(slot, list(range(CHUNK_TOKENS)), False) for slot in range(speakers)]
    return lambda: made.decode(chunks)


def _alone(options: Options, call: Callable[[], object]) -> float:
    return measured(options.device, call, repeats(options), nothing).device_ms


def _together(options: Options, first: Callable[[], object], second: Callable[[], object]) -> float:
    """Return the median milliseconds until both calls have finished."""
    found: list[float] = []
    for _ in range(2 + repeats(options)):
        ready = threading.Barrier(3)
        threads = [
            threading.Thread(target=_on_stream, args=(options.device, call, ready))
            for call in (first, second)
        ]
        for thread in threads:
            thread.start()
        synchronize(options.device)
        ready.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found[2:])


def _on_stream(device: torch.device, call: Callable[[], object], ready: threading.Barrier) -> None:
    with torch.inference_mode():
        if device.type != "cuda":
            ready.wait()
            call()
            return
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            ready.wait()
            call()
        stream.synchronize()


if __name__ == "__main__":
    sys.exit(main())
