"""Options of ``executor``: where the work runs, and what is done about clients at fault."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedfleet.simulator.registry import Options

Count = Annotated[int, Field(ge=1)]


class Executor(Options):
    """Where the work runs. None of these keys but ``inner``, ``block_size``, threads, device, differences and what is compiled
    may change a bit."""

    kind: Literal["auto", "local", "ray"] = "auto"
    """local: in this process; ray: on a pool of Ray actors; auto: in this process where a run is over in the time that Ray takes to
    start, and nothing is asked of Ray."""
    inner: Literal["auto", "serial", "batched", "factored"] = "auto"
    """One client at a time; a block at once; a block at once with the clients' weights factored."""
    actors: Count | Literal["auto"] = "auto"
    """Ray actors; auto: as many as the CPUs, and the GPUs if they have any, can take."""
    cpus_per_actor: float = Field(default=1.0, ge=0.01)
    """CPUs reserved for an actor; may be fractional."""
    gpus_per_actor: float = Field(default=0.0, ge=0)
    """GPUs reserved for an actor; may be fractional. Above 0, clients are trained on the GPU."""
    memory_per_actor_gb: float | None = Field(default=None, gt=0)
    """Memory reserved for an actor on a cluster, where nodes have less of it for their CPUs than actors take; `fedfleet plan` says
    what a block takes."""
    threads_per_actor: int = Field(default=1, ge=1, le=1024)
    """Torch threads of an actor."""
    block_size: Count | Literal["auto"] = "auto"
    """Clients a block at most, the unit of dispatch and of summation; several blocks are even in number."""
    capture: bool | Literal["compiled"] = True
    """Replay blocks of a kind that has come often as the tensor operations they come to, which is faster; to the bit the same.
    compiled: by ``torch.compile`` besides, which takes seconds to minutes a kind and process and is faster still, but says
    ``bit_exact: false``."""
    train_all: bool = False
    """Let clients that answer too late work all the same, and throw the result away, as a real federation does."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if ``gpus_per_actor`` is above 0."""
    deterministic: bool = True
    """On a GPU, compute with the same bits each time; false allows faster algorithms, and the run says ``bit_exact: false``."""
    tf32: bool = False
    """On a GPU, let products and convolutions of float32 round what they multiply to TF32, which is faster."""
    address: str | None = None
    """Address of a running Ray cluster; a private one is started on loopback if not given."""
    allow_differences: bool = False
    """Take nodes with other versions or another processor than the driver's; a run that had any says ``bit_exact: false``."""
    node_silence_s: float | None = Field(default=None, ge=1)
    """Seconds without an answer after which a node's blocks run elsewhere; not given, Ray's own check decides, after 65 s."""

    @property
    def of_ray(self) -> bool:
        """Say whether something is given that Ray alone has."""
        return not OF_RAY.isdisjoint(self.model_fields_set)


OF_RAY = {
    "actors",
    "cpus_per_actor",
    "gpus_per_actor",
    "memory_per_actor_gb",
    "address",
    "allow_differences",
    "node_silence_s",
}


IN_PROCESS = {
    "executor.kind": "local",
    "executor.address": None,
    "executor.memory_per_actor_gb": None,
    "executor.allow_differences": False,
    "executor.node_silence_s": None,
}
"""Overrides that bring a run into this process, whatever was asked of a cluster."""


class FaultOptions(Options):
    """What is done about clients at fault: fail ends the run, drop_client goes on without them."""

    on_client_error: Literal["fail", "drop_client"] = "fail"
    """Where client code raises."""
    non_finite: Literal["fail", "drop_client", "keep"] = "fail"
    """Where what a client sends, or its own state, is NaN or infinite; keep takes it as it is."""
    client_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds of the machine's clock after which a client is taken to have raised; on Ray only, where its actor is stopped."""
