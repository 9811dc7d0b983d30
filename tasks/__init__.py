"""Tasks: models, objectives and metrics, a file a task, and what several share; ``registry`` names them.

``fedfleet.tasks.from_module`` makes a task of any net.

May import: files, simulator, simulator.arithmetic.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedfleet.tasks.module import from_module as from_module

__all__ = ["from_module"]


def __getattr__(name: str) -> Any:
    """Import what is asked for (PEP 562): workers need not import every task for one of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedfleet.tasks import module

    return getattr(module, name)
