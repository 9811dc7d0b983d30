"""The executors by the kind that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fedfleet.config import resolve
from fedfleet.config.platforms import check_ray
from fedfleet.config.schema import Config
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.signals import imported

if TYPE_CHECKING:
    from fedfleet.assembly.metrics_export import MetricsExport


class Kind(NamedTuple):
    """An executor: what a configuration asks of one, how one is made of that, what it is in words, where else a run shows."""

    asked: Callable[[Config], tuple[Any, ...]]
    build: Callable[..., Executor]
    describe: Callable[[Config], str]
    gauges: Callable[[], MetricsExport | None]


def _ray_asks(config: Config) -> tuple[Any, ...]:
    e = config.executor
    one = (e.cpus_per_actor, e.gpus_per_actor, e.threads_per_actor)
    actors = resolve.actors(config)
    more = (e.allow_differences, e.node_silence_s, e.memory_per_actor_gb)
    return None if actors == "auto" else actors, *one, e.address, resolve.cpus(), *more


def _ray(*asked: Any) -> Executor:
    return on_ray("ray").RayExecutor(*asked)


def _ray_gauges() -> MetricsExport:
    return imported("fedfleet.assembly.metrics_export").MetricsExport()


def on_ray(module: str) -> Any:
    """Import a module of ``simulator.executors`` that needs Ray, which takes a second. Raises ConfigError where there is no Ray."""
    check_ray("executor.kind='ray'")
    try:
        return imported(f"fedfleet.simulator.executors.{module}")
    except ImportError as e:
        raise ConfigError(
            f"executor.kind='ray': Ray cannot be imported here ({one_line(e)}): set executor.kind=local, and for several runs jobs "
            f"to 1"
        ) from e


def _ray_actors(config: Config) -> str:
    e = config.executor
    result = resolve.actors(config)
    count = "on as many Ray actors as the cluster has room for," if result == "auto" else f"on {result} Ray actors"
    cpus = f"{e.cpus_per_actor:g} CPU{'s' * (e.cpus_per_actor != 1)}"
    return f"{count} of {cpus}" + (f" and {e.gpus_per_actor:g} GPUs" if e.gpus_per_actor else "")


EXECUTORS: Mapping[str, Kind] = {
    "local": Kind(
        lambda config: (config.executor.threads_per_actor,),
        LocalExecutor,
        lambda config: "in this process",
        lambda: None,
    ),
    "ray": Kind(_ray_asks, _ray, _ray_actors, _ray_gauges),
}
