"""The training loop of one stage on one process."""

import math
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from sferic.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, step_of
from sferic.config import Stage, batch_tokens_at, lr_at
from sferic.data import Pack, PackStream
from sferic.nn import Batch, HybridModel
from sferic.train.losses import RoutingStats, micro_batch_loss
from sferic.train.metrics import LiveLine, MetricsLog, Row, plot_losses
from sferic.train.optimizer import build_optimizer
from sferic.train.precision import compute_dtype
from sferic.train.profile import StepProfile


class Interrupted(Exception):
    """A signal stopped the run after it saved; `signum` says which."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


class Diverged(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient."""


@dataclass
class Progress:
    """What a checkpoint holds beside tensors; the next step depends on nothing else."""

    step: int = 0  # finished optimizer steps, skipped ones too
    tokens: int = 0  # consumed
    pack: int = 0  # index of the next pack
    skipped: int = 0  # steps whose loss or gradient was not finite
    bad_in_a_row: int = 0  # of them, those since the last good step
    seconds: float = 0.0  # spent in steps


class Trainer:
    """Runs a stage from its last checkpoint to the end of its budget.

    Packs are a pure function of their index, so with weights, optimizer and `Progress` a resumed
    run repeats the bits of one never stopped.
    """

    def __init__(
        self,
        stage: Stage,
        model: HybridModel,
        stream: PackStream,
        heldout: list[Pack],
        folder: Path,
        device: torch.device,
    ) -> None:
        """Build the optimizer and go to the last checkpoint, if there is one.

        Args:
            stage: schedule and sizes.
            model: weights in float32 on the device; overwritten when a checkpoint exists.
            stream: packs of the stage's length.
            heldout: packs whose loss is the validation loss.
            folder: checkpoints, metrics and plot go here.
            device: of the model.
        """
        self.stage = stage
        self.model = model
        self.stream = stream
        self.heldout = heldout
        self.folder = folder
        self.device = device
        self.checkpoints = folder / "checkpoints"
        model.compute_dtype = compute_dtype(stage.precision, device)
        model.recompute = stage.recompute
        self.optimizer = build_optimizer(model, stage.optimizer)
        self.progress = Progress()
        self.data = stream.store.meta.tokens_sha256
        self.resumed_from = latest_checkpoint(self.checkpoints)
        if self.resumed_from is not None:
            saved = load_checkpoint(self.resumed_from, model, self.optimizer)
            if saved.pop("data") != self.data:
                raise ValueError(
                    f"{self.resumed_from} was trained on another token store than "
                    f"{stream.store.path}; use another run folder"
                )
            self.progress = Progress(**saved)
        self._signal: int | None = None

    def run(self, profile: StepProfile | None = None) -> list[Row]:
        """Train to the end of the budget; returns all metrics rows.

        Args:
            profile: traces one of the steps.

        Raises:
            Interrupted: SIGINT or SIGTERM came; a checkpoint was saved, unless amid bad steps.
            Diverged: `max_bad_steps` steps in a row were skipped; the last good checkpoint stays.
        """
        log = MetricsLog(self.folder / "metrics.jsonl", self.progress.step)
        line = LiveLine(self.stage.name, self._share())
        if self.resumed_from is not None:
            what = "finished before, at step" if self._done() else "resumed at step"
            line.note(f"{self.stage.name}: {what} {self.progress.step}")
        old = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            while not self._done():
                row = self.step() if profile is None else profile.run(self.step)
                if self.progress.step % self.stage.validate_every == 0 or self._done():
                    row["validation_loss"] = self.validate()
                log.write(row)
                if "bad" in row:
                    line.note(f"step {row['step']} skipped: {row['bad']}")
                    self._stop_if_diverging(row)
                line.update(row, min(self._share(), 1.0))
                self._save_if_due()
                if self._signal is not None:
                    raise Interrupted(self._signal, self._farewell())
        finally:
            for signum, handler in old.items():
                signal.signal(signum, handler)
            line.finish()
            log.close()
            if log.rows:
                plot_losses(log.rows, self.folder / "loss.png", self.stage.name)
        return log.rows

    def step(self) -> Row:
        """One optimizer step; a non-finite loss or gradient skips the update."""
        begin = time.perf_counter()
        tokens = batch_tokens_at(self.stage, self.progress.step, self.progress.tokens)
        lr = lr_at(self.stage, self.progress.step, self.progress.tokens)
        packs = self._packs(tokens)
        loss, auxiliary, stats = self._forward_backward(packs)
        norm = self._gradient_norm()
        bad = self._non_finite(loss + auxiliary, norm)
        if bad is None:
            self._update(lr, norm)
        seconds = time.perf_counter() - begin
        self._count(tokens, len(packs), bad, seconds)
        row: Row = {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "loss": loss,
            "auxiliary_loss": auxiliary,
            "lr": lr,
            "grad_norm": norm,
            "skipped": self.progress.skipped,
            "tokens_per_second": tokens / seconds,
            **stats.summary(),
        }
        row = {key: value if math.isfinite(value) else None for key, value in row.items()}
        return row if bad is None else {**row, "bad": bad}

    def _packs(self, tokens: int) -> list[Pack]:
        """The step's micro-batches."""
        first = self.progress.pack
        return [self.stream.pack(first + i) for i in range(tokens // self.stage.seq_len)]

    def _forward_backward(self, packs: list[Pack]) -> tuple[float, float, RoutingStats]:
        """Sum the micro-batches' gradients; cross entropy and auxiliary loss of the step."""
        labels = max(sum(int((pack.labels >= 0).sum()) for pack in packs), 1)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        stats = RoutingStats()
        loss = auxiliary = torch.zeros((), device=self.device)
        for pack in packs:
            batch = Batch.from_pack(pack, self.device)
            ce, aux, routings = micro_batch_loss(self.model, batch, labels, len(packs))
            (ce + aux).backward()
            loss, auxiliary = loss + ce.detach(), auxiliary + aux.detach()
            stats.add(routings)
        return float(loss), float(auxiliary), stats

    def _gradient_norm(self) -> float:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    def _update(self, lr: float, norm: float) -> None:
        """Clip and step."""
        torch.nn.utils.clip_grads_with_norm_(
            self.model.parameters(), self.stage.optimizer.clip_norm, torch.tensor(norm)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _count(self, tokens: int, packs: int, bad: str | None, seconds: float) -> None:
        at = self.progress
        at.step += 1
        at.tokens += tokens
        at.pack += packs
        at.seconds += seconds
        at.skipped += bad is not None
        at.bad_in_a_row = 0 if bad is None else at.bad_in_a_row + 1

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss in nats per label of the held-out packs."""
        self.model.eval()
        total, labels = 0.0, 0
        for pack in self.heldout:
            batch = Batch.from_pack(pack, self.device)
            assert batch.labels is not None
            total += float(self.model.loss(self.model.hidden(batch)[0], batch.labels))
            labels += int((pack.labels >= 0).sum())
        return total / labels

    def save(self) -> Path:
        """Write a checkpoint of this moment."""
        progress = {**asdict(self.progress), "data": self.data}
        return save_checkpoint(
            self.checkpoints,
            self.progress.step,
            self.model,
            self.optimizer,
            progress,
            self.stage.keep_checkpoints,
        )

    def _save_if_due(self) -> None:
        """Save at the end, on a signal, and on schedule; but not amid bad steps, and never weights
        that aren't finite: the last good checkpoint must stay.

        Raises:
            Diverged: the end has come with weights that aren't finite.
        """
        scheduled = self.progress.step % self.stage.checkpoint_every == 0
        calm = self.progress.bad_in_a_row == 0 and (scheduled or self._signal is not None)
        if not (calm or self._done()):
            return
        bad = _not_finite(self.model.named_parameters())
        if not bad:
            self.save()
        elif self._done():
            raise Diverged(
                f"the stage ends with weights that are not finite: {bad[0]}{self._good()}"
            )

    def _farewell(self) -> str:
        assert self._signal is not None
        good = latest_checkpoint(self.checkpoints)
        what = f"saved at step {step_of(good)}" if good else "nothing was saved yet"
        return f"{signal.Signals(self._signal).name}: {what}; the same command goes on from there"

    def _done(self) -> bool:
        return self._share() >= 1

    def _share(self) -> float:
        """Of the budget that is spent; the last step may overshoot a budget of tokens."""
        budget = self.stage.budget
        if budget.steps is not None:
            return self.progress.step / budget.steps
        assert budget.tokens is not None
        return self.progress.tokens / budget.tokens

    def _non_finite(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            names = _not_finite((n, p.grad) for n, p in self.model.named_parameters())
            where = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names)
            return f"the gradient of {where} is not finite" if names else f"gradient norm {norm}"
        return None

    def _stop_if_diverging(self, row: Row) -> None:
        if self.progress.bad_in_a_row >= self.stage.max_bad_steps:
            raise Diverged(
                f"{self.stage.max_bad_steps} steps in a row were skipped, the last because "
                f"{row['bad']}{self._good()}. Lower the learning rate, or look at the data of "
                f"packs before {self.progress.pack}"
            )

    def _good(self) -> str:
        good = latest_checkpoint(self.checkpoints)
        return f"; the last good checkpoint is {good}" if good else "; no checkpoint was saved yet"

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signal = signum


def _not_finite(tensors: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Names of the tensors that hold an infinity or NaN."""
    return [name for name, t in tensors if t is not None and not bool(t.isfinite().all())]
