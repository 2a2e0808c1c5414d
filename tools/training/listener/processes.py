"""Trains the listener in one or several processes, which average their gradients."""

from __future__ import annotations

import os
import tempfile
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, cast

import torch
from torch import Tensor, distributed

from training.answers import speak_answer
from training.corpus.store import Corpus
from training.dimensions import default_config
from training.domain import all_answers
from training.listener.starting import LISTENER, tensors_of, widened, with_new_layers
from training.listener.training import ListenerPlan, ListenerTraining
from training.torch_calls import load_tensors
from training.vision.views import load_bank, with_mixed_rows
from training.vocabulary import Vocabulary, build_tokenizer

CORPUS, STATE, BANK = "corpus", "listener.pt", "pictures.pt"


def train_listener(
    workspace: Path, plan: ListenerPlan, processes: int, start: Path | None = None
) -> dict[str, Tensor]:
    """Train the listener to the end; return its tensors with their names in the checkpoint.

    It begins with the weights of the checkpoint in `start`, or with random weights.

    Raises RuntimeError if a process fails. The next call continues from the saved state.
    """
    with tempfile.TemporaryDirectory(prefix="duplane-train-") as folder:
        meeting = Path(folder, "processes")
        context = get_context("spawn")
        running = [
            context.Process(
                target=run_rank, args=(workspace, plan, meeting, (rank, processes), start)
            )
            for rank in range(processes)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join()
        failed = [process.exitcode for process in running if process.exitcode]
    if failed:
        raise RuntimeError(f"training failed (exit codes {failed})")
    return listener_tensors(workspace)


def end_with_parent() -> None:
    """Let this process end when the process that started it ends, even by SIGKILL.

    Otherwise it would train on, and write the same state as the run that continues.
    """
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def run_rank(
    workspace: Path,
    plan: ListenerPlan,
    meeting: Path,
    share: tuple[int, int],
    start: Path | None,
) -> None:
    """Train as one of several processes, on one thread."""
    end_with_parent()
    rank, processes = share
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    tokenizer = build_tokenizer()
    training = ListenerTraining(
        default_config(tokenizer),
        Vocabulary(tokenizer),
        Corpus(workspace / CORPUS),
        {text: speak_answer(text) for text in all_answers()},
        plan,
        with_mixed_rows(load_bank(workspace / BANK), plan.seed),
        workspace / STATE,
        share=share,
    )
    if start is not None:
        drawn = dict(training.networks.tensors())
        found = widened(tensors_of(start, LISTENER, tokenizer), drawn)
        training.networks.load(with_new_layers(found, drawn))
    if processes == 1:
        training.run()
        return
    address = f"file://{meeting}"
    join = cast("Any", distributed)
    join.init_process_group("gloo", init_method=address, rank=rank, world_size=processes)
    try:
        training.run()
    finally:
        join.destroy_process_group()


def listener_tensors(workspace: Path) -> dict[str, Tensor]:
    """Return the mean of the latest weights, with their names in the checkpoint."""
    return load_tensors(workspace / STATE)["mean"]
