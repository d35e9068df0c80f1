"""The demo job: train with FSDP2, push the weights into a real vLLM server, and ask it what it has learned.

Started by torchrun, one rank a GPU (or on the CPU); `conf/train.yaml` has the command line and the settings.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import time
from contextlib import ExitStack
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F

from recipes.config import CONF_DIR, DataConfig, JobConfig, OptimConfig, TrainConfig
from recipes.inference import start_servers
from recipes.job import Metrics, Stages, model_dir_on_all, model_of, sender_of, title_of
from recipes.launch import quiet_other_ranks, register_configs, start
from recipes.mesh import Layout, layout_of
from recipes.optim import Optimization
from recipes.pushing import Pusher
from recipes.ranks import on_rank0
from recipes.report import Push, Report


class Windows:
    """What one rank reads of the text.

    Args:
        tokens: The whole text as token ids, `[num_tokens]` int64 on the model's device; taken as a circle.
        config: The loop's settings.
        rank: This rank among those that read different data.
    """

    def __init__(self, tokens: torch.Tensor, config: TrainConfig, rank: int) -> None:
        self._tokens, self._config = tokens, config
        self._random = torch.Generator().manual_seed(config.seed * 1000 + rank)

    def batch(self) -> torch.Tensor:
        """Windows of the text, `[batch_size, seq_len + 1]`, every second one from its beginning."""
        length = min(self._config.seq_len + 1, len(self._tokens))
        starts = torch.randint(len(self._tokens), (self._config.batch_size,), generator=self._random)
        if torch.rand((), generator=self._random) < 0.5:
            starts[0] = 0
        return torch.stack([self._tokens.roll(-int(start))[:length] for start in starts])


def next_token_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of every token but the first, given those before it."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


class Trainer:
    """The training loop's state: model, optimizer, data; the same calls on every rank.

    Args:
        model: The sharded model.
        tokens: As for `Windows`.
        config: The loop's settings.
        optim: The optimizer's settings.
        rank: This rank among those that read different data.
    """

    def __init__(
        self, model: nn.Module, tokens: torch.Tensor, config: TrainConfig, optim: OptimConfig, rank: int
    ) -> None:
        self._model = model
        self._windows = Windows(tokens, config, rank)
        self._optimization = Optimization(model.parameters(), optim, config.steps)

    def step(self) -> float:
        """Do one optimizer step. Collective. Returns this rank's loss."""
        loss = next_token_loss(self._model, self._windows.batch())
        loss.backward()
        self._optimization.step()
        return loss.item()


def run(job: JobConfig, device: torch.device, out: Path) -> None:
    """Run the job on this rank. Collective over all ranks of torchrun.

    1) (rank 0) write the model's directory, start the server in the background;
    2) (all ranks) build and shard the model, train up to the first push;
    3) (rank 0) wait until the server is healthy, ask it for a completion of its random weights;
    4) (all ranks) push, (rank 0) ask again, go on training; the last step pushes too.

    Args:
        job: The settings.
        device: This rank's device.
        out: Directory for the server's log and the model's files; rank 0 writes to it.
    """
    is_first, began = dist.get_rank() == 0, time.monotonic()
    text = read_text(job.data)
    layout = layout_of(job.mesh, device.type)
    with ExitStack() as stack:
        report = stack.enter_context(
            Report(steps=job.train.steps, active=is_first, machine=job.logger.json, prompt=job.data.prompt)
        )
        report.expected = continuation(text, job.data.prompt)
        metrics = stack.enter_context(Metrics(out, active=is_first and job.logger.metrics))
        left = out if job.logger.metrics else None
        model_dir = model_dir_on_all(job, out)
        inference = start_servers(job.inference, model_dir, out, stack, report, device)

        def ask() -> str | None:
            if not job.complete:
                return None
            return on_rank0(lambda: inference.complete(job.data.prompt, job.data.max_tokens))

        if job.inference.url is not None:
            inference.wait(report.waiting)  # a wrong address is told before anything is trained
        model = model_of(job, model_dir, layout)
        trainer = trainer_of(job, model, model_dir, layout, device)
        pusher: Pusher | None = None
        server_s = 0.0
        for step in range(1, job.train.steps + 1):
            stages, stats = Stages(), None
            with stages("train"):
                loss = trainer.step()
            report.step(step, loss)
            if step % job.hook.every == 0 or step == job.train.steps:
                if pusher is None:
                    with stages("wait for server"):
                        inference.wait(report.waiting)
                    report.ready(server_s := time.monotonic() - began)
                    with stages("complete"):
                        report.before = ask()
                    sender = stack.enter_context(
                        sender_of(job, model, inference.client, out, report.callbacks(left))
                    )
                    pusher = Pusher(inference, job.hook, sender, report)
                    pusher.rest(stages)
                stats = pusher.push(step, stages)
                with stages("complete"):
                    answer = ask()
                report.pushed(Push.of(stats, loss=loss, text=answer, expected=report.expected))
                if step != job.train.steps:
                    pusher.rest(stages)
            metrics.row(step, stages, stats, loss=loss)
        report.finish(
            {
                "world_size": dist.get_world_size(),
                "device": device.type,
                "parameters": sum(p.numel() for p in model.parameters()),
                "server_ready_s": round(server_s, 2),
                "train_s": round(sum(row["time"]["train"] for row in metrics.rows), 2),
                "total_s": round(time.monotonic() - began, 2),
            },
            out=out if job.logger.report else None,
            title=title_of("train", job),
            config=job,
        )


def read_text(data: DataConfig) -> str:
    """Read the text to learn: a file, or the Zen of Python out of the standard library."""
    if data.path is not None:
        return Path(data.path).read_text()
    with contextlib.redirect_stdout(io.StringIO()):  # the module prints itself when it is imported
        import this
    return codecs.decode(this.s, "rot13")


def continuation(text: str, prompt: str) -> str:
    """What a model that knows the text by heart says after the prompt; empty if the prompt is not in it."""
    _, found, after = text.partition(prompt)
    return after if found else ""


def trainer_of(
    job: JobConfig, model: nn.Module, model_dir: Path, layout: Layout, device: torch.device
) -> Trainer:
    """This rank's training loop, on the job's text."""
    tokens = tokens_of(read_text(job.data), model_dir).to(device)
    return Trainer(model, tokens, job.train, job.optim, layout.data_rank)


def tokens_of(text: str, model_dir: Path) -> torch.Tensor:
    """The text as token ids, with an end of text behind it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return torch.tensor([*ids, *end])


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
def _main(cfg: DictConfig) -> None:
    start(cfg, JobConfig, run)


def main() -> None:
    """Entry point of `python -m recipes.train`."""
    register_configs()
    quiet_other_ranks()
    _main()


if __name__ == "__main__":
    main()
