"""A case in Flower's simulation engine (Ray), run by its own interpreter: ``flower_loop.py JOB``."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import time
from importlib.metadata import version
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import torch
import workload
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

JOB = workload.asked()
SECONDS: list[float] = []


def fit(case: workload.Case, message: Message, partition: int) -> Message:
    """Train one client from the model it is sent."""
    torch.set_num_threads(1)
    model = workload.scratch(case)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = workload.data(case)  # made once a worker process, in a warm-up round
    workload.train(model, x[partition], y[partition], case)
    sent = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": case.samples})}
    return Message(content=RecordDict(sent), reply_to=message)


class Timed(FedAvg):
    """FedAvg that times every round, from choosing the cohort to the mean."""

    def configure_train(self, *args: Any, **kwargs: Any) -> Any:
        """Start the clock."""
        self.started = time.perf_counter()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, *args: Any, **kwargs: Any) -> Any:
        """Stop the clock."""
        mean = super().aggregate_train(*args, **kwargs)
        SECONDS.append(time.perf_counter() - self.started)
        return mean


client = ClientApp()
server = ServerApp()


@client.train()
def on_train(message: Message, context: Context, case: workload.Case = JOB.case) -> Message:
    """Answer the server."""
    return fit(case, message, int(context.node_config["partition-id"]))


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, without evaluation."""
    case = JOB.case
    strategy = Timed(
        fraction_train=case.cohort / case.clients,
        fraction_evaluate=0.0,
        min_train_nodes=case.cohort,
        min_evaluate_nodes=0,
        min_available_nodes=case.clients,
    )
    arrays = ArrayRecord(workload.net(case).state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=JOB.warmup + JOB.rounds)


if __name__ == "__main__":
    run_simulation(
        server,
        client,
        num_supernodes=JOB.case.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": JOB.workers, "logging_level": "ERROR", "include_dashboard": False},
        },
    )
    workload.answer(SECONDS, JOB, f"flwr {version('flwr')}")
