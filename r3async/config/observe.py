"""Section `observe`: where metrics go besides `metrics.jsonl`, which is always written."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from r3async.config.section import Port, Positive, PositiveInt, Section

SinkName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class ObserveConfig(Section):
    timeline: bool = True
    """Write who did what when into `timeline.jsonl`: a few lines a step and one a group. The report draws them."""
    sinks: list[SinkName] = msgspec.field(default_factory=list)
    """Where each step's row goes too. Each needs its package: `pip install "r3async[sinks]"`. None can slow or stop a run."""
    project: str = "r3async"
    """Project (W&B, trackio) or experiment (MLflow) that the run belongs to; in it, it has the name of its directory."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """`offline`: kept in the run's directory until `wandb sync`. `online` needs `wandb login` before."""
    mlflow_uri: str = ""
    """Tracking server or store of MLflow; default: `mlruns` in the run's directory."""
    sink_queue: PositiveInt = 1024
    """Rows that may wait for a slow sink. Further ones are left out for it, counted, and reported once."""
    sink_timeout: Positive = 15.0
    """Seconds that the end of a run waits for sinks to write what they have."""
    prometheus_port: Port | None = None
    """If set, every process of the run serves `/metrics` on the first free port from this one on: its memory and CPU time; the
    driver also the figures of the last step, and a generator those of its engine. Where is written into
    `runs/NAME/prometheus/`, which Prometheus reads as `file_sd_configs`. 0: any free port."""
    prometheus_host: str = "127.0.0.1"
    """Interface that it binds to. Loopback unless named."""

    def __post_init__(self) -> None:
        if urlsplit(self.mlflow_uri).password is not None:
            raise ValueError(
                "`mlflow_uri` has a password, and it is written to `config.toml`: leave it out, and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError("`sinks` names one twice")
