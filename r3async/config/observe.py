"""The configuration sections `observe` and `log`."""

from __future__ import annotations

from typing import Literal

import msgspec

from r3async.config.section import Port, Section

SinkName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class ObserveConfig(Section):
    timeline: bool = True
    """Record in `timeline.jsonl` which process did what when; the report draws it."""
    record: Literal["off", "full"] = "off"
    """`full`: keep what the learner trains on in `recording/`, for `python -m r3async.tools
    replay`."""
    prometheus_port: Port | None = None
    """First port for Prometheus (docs/observing.md#prometheus-and-grafana): each process serves
    `/metrics` on the first free one from this on. 0: any free port."""
    prometheus_host: str = "127.0.0.1"
    """Interface that `/metrics` binds to. Loopback unless set."""


class LogConfig(Section):
    to: list[SinkName] = msgspec.field(default_factory=list)
    """Services that get each step's metrics, evaluations and sample episodes
    (docs/observing.md#wb-tensorboard-mlflow-trackio). Needs `pip install "r3async[sinks]"`."""
    metrics: Literal["main", "all"] = "main"
    """Metrics that are sent. `main`: the forty or so that reports and `tail` show, rewards and
    evaluations. `all`: also the times of each process's stages."""
    project: str = "r3async"
    """Project (W&B, trackio) or experiment (MLflow); the run is named like its directory."""

    def check_values(self) -> None:
        if len(set(self.to)) < len(self.to):
            raise ValueError("`to` names one twice")
