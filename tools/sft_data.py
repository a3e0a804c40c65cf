"""The data of a supervised run: the user's rows as samples, in the order of steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from r3async.config import Config, ConfigError
from r3async.data.tokens import Sample
from r3async.envs.row_conversations import parse_conversation
from r3async.envs.row_tasks import DatasetTask, parse_tools
from r3async.envs.task_splits import TaskSplits, is_dataset, resolve_data_config
from r3async.learner.micro_batch_plan import CostModel, build_cost_model
from r3async.rollout.demonstrations import build_demonstration
from r3async.rollout.renderer import ChatRenderer, TemplateError
from r3async.untrusted import decode_python_json

from .rows import make_renderer


@dataclass(frozen=True)
class SupervisedRows:
    """The rows of a supervised run. The rows of a step depend only on the seed and the step.

    Attributes:
        rows: The samples of each row; one, or several where the template rewrites history.
        held_out: Samples that are never trained.
        digest: Digest of the rows.
    """

    rows: list[list[Sample]]
    held_out: list[Sample]
    digest: str
    cost: CostModel
    seed: int
    rows_per_step: int

    @staticmethod
    def from_config(config: Config, print_line: Callable[[str], object]) -> SupervisedRows:
        """Read the rows; those that do not fit into `episode.max_total_tokens` are
        dropped and counted.

        Raises `ConfigError`.
        """
        if not is_dataset(config.env):
            raise ConfigError(
                "`data` names no rows to learn: set `data` = FILE, a directory, or the id of a "
                "dataset on the hub"
            )
        data = resolve_data_config(config.env)
        path = Path(config.model.path)
        tasks = TaskSplits(data, parse_row=parse_conversation)
        if data.digest not in ("", tasks.digest):
            raise ConfigError(
                f"`data` = {data.path!r}: the rows are not those that the run began "
                "with: put them back"
            )
        renderer = make_renderer(config)
        assert renderer is not None
        longest = min(config.episode.max_total_tokens, config.learner.max_tokens_per_micro_batch)
        rows = _render_samples(tasks.train, renderer, longest, "trained", print_line)
        held_out = (
            _render_samples(tasks.eval, renderer, longest, "held out", print_line)
            if tasks.eval
            else []
        )
        cost = build_cost_model(decode_python_json((path / "config.json").read_bytes()))
        return SupervisedRows(
            rows,
            [s for row in held_out for s in row],
            tasks.digest,
            cost,
            config.seed,
            config.sft.rows_per_step,
        )

    def update_config(self, config: Config) -> Config:
        """Return the configuration with the steps for `sft.epochs` and the rows' digest,
        fixed for any resume."""
        steps = config.steps
        if config.sft.epochs:
            steps = max(1, math.ceil(config.sft.epochs * len(self.rows) / self.rows_per_step))
        config = msgspec.structs.replace(config, steps=steps)
        config.env = msgspec.structs.replace(
            config.env, args={**config.env.args, "digest": self.digest}
        )
        config.schedule = msgspec.structs.replace(
            config.schedule, minibatches_per_step=1, epochs_per_step=1
        )
        return config

    def select_step_samples(self, step: int) -> list[Sample]:
        """Return the samples of step `step` (from 0): the next rows, with another
        order in each epoch."""
        count = len(self.rows)
        out = []
        first = step * self.rows_per_step
        orders = dict[int, Sequence[int]]()
        for at in range(first, first + self.rows_per_step):
            epoch, place = divmod(at, count)
            if epoch not in orders:
                orders[epoch] = self._shuffle_rows(epoch)
            out += [_rename_sample(s, f"{at}") for s in self.rows[orders[epoch][place]]]
        return out

    def _shuffle_rows(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self.rows)))
        random.Random(f"sft {self.seed} {epoch}").shuffle(order)
        return order


def _rename_sample(sample: Sample, prefix: str) -> Sample:
    """Rename a sample, so that a row that occurs twice in a step gives two samples."""
    return Sample(f"{prefix}:{sample.sample_id}", sample.table, sample.temperature)


def _render_samples(
    tasks: Sequence[DatasetTask],
    renderer: ChatRenderer,
    longest: int,
    part: str,
    print_line: Callable[[str], object],
) -> list[list[Sample]]:
    out = []
    shortest = 0
    unasked = list[tuple[str, str]]()
    for number, task in enumerate(tasks):
        try:
            demonstration = build_demonstration(renderer, task.messages, parse_tools(task))
        except (TemplateError, ValueError) as error:
            raise ConfigError(f"{task.location}: {error}") from error
        samples = demonstration.build_samples(str(number))
        if demonstration.unwritten_prompt_end:
            unasked.append((task.location, demonstration.unwritten_prompt_end))
        length = max(len(s.table) for s in samples)
        if length <= longest:
            out.append(samples)
        shortest = min(shortest or length, length)
    if not out:
        raise ConfigError(
            f"all {len(tasks)} rows are longer than `episode.max_total_tokens` = {longest}; the "
            f"shortest has {shortest} tokens"
        )
    tokens = sum(int(s.table["loss_mask"].sum()) for row in out for s in row)
    dropped = len(tasks) - len(out)
    longer = f" ({dropped} longer than episode.max_total_tokens = {longest})" if dropped else ""
    print_line(
        f"data: {len(out)} rows are {part}, {dropped} dropped{longer}; {tokens} tokens of answers"
    )
    if unasked:
        where, text = unasked[0]
        print_line(
            f"data: the prompt of an episode ends with {text!r}, which the chat template does "
            f"not write before the answers of {len(unasked)} rows, such as {where}: they are "
            "learnt without it"
        )
    return out
