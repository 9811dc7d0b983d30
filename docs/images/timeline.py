"""Draw docs/images/timeline.svg, a phase resolved by the engine: ``python docs/images/timeline.py``."""

from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

from fedfleet.report.figures import FATE_COLORS
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.devices import Homogeneous, Load
from fedfleet.simulator.fleet.policies import Deadline, First
from fedfleet.simulator.fleet.responses import Federation, Outcome, respond


class Gone:
    """Client 2 is offline at first, client 5 later on."""

    def online(self, key: rng.Key, clients: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        """Return who is online."""
        return ~(((clients == 2) & (seconds < 20)) | ((clients == 5) & (seconds > 5)))


clients = torch.arange(8)
load = Load(torch.full_like(clients, 5), torch.full_like(clients, 50))
federation = Federation(
    availability=Gone(), devices=Homogeneous(30.0, 0.6), policy=Deadline(60.0, First(4)), hazard=0.006
)
found = respond(federation, clients, torch.zeros_like(clients), load, 0.0, rng.key(14), rng.key(1))
mpl.rcParams["svg.hashsalt"] = "fedfleet"
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for client, outcome, seconds in zip(clients.tolist(), found.outcome.tolist(), found.seconds.tolist(), strict=True):
    name = Outcome(outcome).name.lower()
    axes.barh(client, seconds, height=0.5, color=FATE_COLORS[name], alpha=0.85)
    axes.plot(seconds, client, "x" if name == "failed" else "o", color=FATE_COLORS[name], markersize=7)
    axes.annotate(name, (seconds, client), (8, 0), textcoords="offset points", va="center")
axes.axvline(found.duration_s, color="black", linestyle="--", linewidth=1)
axes.annotate("close: 4 answers are in", (found.duration_s, -0.9), (5, 0), textcoords="offset points", va="center")
axes.set(xlabel="virtual seconds since the invitation", yticks=clients.tolist(), ylim=(7.6, -1.4), xlim=(-1, 72))
axes.set_yticklabels([f"client {c}" for c in clients.tolist()])
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})
