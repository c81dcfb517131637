"""Which gradient does your KL penalty really follow? Exact answers, trainers and an audit.

What most people need is imported from here, and only when it is asked for: `import kl_comedy` loads
nothing else, the estimators and the audit load torch and numpy alone, the trainers load TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .auditing.audit import audit
    from .theory.config import KLConfig
    from .theory.estimators import exact_kl, k1, k2, k3
    from .theory.surrogate import kl_surrogate
    from .trainers.rloo_grpo import KLGRPOTrainer, KLRLOOTrainer

# The module that each name of the face comes from.
_HOME = {
    "KLConfig": "theory.config",
    "kl_surrogate": "theory.surrogate",
    "k1": "theory.estimators",
    "k2": "theory.estimators",
    "k3": "theory.estimators",
    "exact_kl": "theory.estimators",
    "audit": "auditing.audit",
    "KLRLOOTrainer": "trainers.rloo_grpo",
    "KLGRPOTrainer": "trainers.rloo_grpo",
}
__all__ = ["KLConfig", "KLGRPOTrainer", "KLRLOOTrainer", "audit", "exact_kl", "k1", "k2", "k3",
           "kl_surrogate"]


def __getattr__(name: str) -> object:
    """Import a name of the face when it is first used (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The names of the face, loaded or not, beside those that are there."""
    return sorted({*globals(), *_HOME})
